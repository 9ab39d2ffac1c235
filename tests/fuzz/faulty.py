"""Targets with the faults that a run must find."""

from __future__ import annotations

import logging
import os
import time

from tests.fuzz.source import Source
from tests.fuzz.target import Script, Target
from tests.fuzz.trial import CANARY, peak_rss


class Sound(Target):
    def script(self, source: Source) -> Script:
        return (b"some", source.noise(), b"needle" if source.chance(0.1) else b"hay")

    def run(self, script: Script) -> bool:
        if any(b"needle" in piece for piece in script):
            self.meet()
        return True

    def meet(self) -> None:
        """What happens with one input in ten."""


class Raises(Sound):
    def meet(self) -> None:
        raise KeyError("x")


class Complains(Sound):
    def meet(self) -> None:
        logging.getLogger("x").error("picking failed")


class Tells(Sound):
    def meet(self) -> None:
        logging.getLogger("x").debug("a request", extra={"prompt": CANARY})


class Eats(Sound):
    def meet(self) -> None:
        bytearray(b"x") * (peak_rss() + (100 << 20))  # others in this process may have had much, and given it back


class Hangs(Sound):
    def meet(self) -> None:
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass


class Dies(Sound):
    def meet(self) -> None:
        os._exit(7)
