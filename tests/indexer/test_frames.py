import pytest

from indexer.frames import MAX_TOPIC, REPLAY_END, SNAPSHOT, Message, live_message, replay_message, replay_request

SEVEN = (7).to_bytes(8, "big")
END = b"\xff" * 8


def test_a_live_message_is_topic_sequence_payload() -> None:
    assert live_message([b"kv@a@m", SEVEN, b"p"]) == Message(b"kv@a@m", 7, b"p")
    assert live_message([b"", SEVEN + b"more", b""]) == Message(b"", 7, b"")


@pytest.mark.parametrize("frames", [[], [b"t"], [b"t", SEVEN], [b"t", b"\0\0\7", b"p"], [b"t", SEVEN, b"p", b"x"]])
def test_other_live_frames_are_malformed(frames: list[bytes]) -> None:
    assert live_message(frames) is None


@pytest.mark.parametrize(
    ("frames", "topic"),
    [
        ([b"", b"kv@a@m", SEVEN, b"p"], b"kv@a@m"),  # vLLM from 0.26
        ([b"", SEVEN, b"p"], b""),  # vLLM before, SGLang
        ([b"kv@a@m", SEVEN, b"p"], b"kv@a@m"),  # without delimiter
        ([SEVEN, b"p"], b""),
    ],
)
def test_replies_with_and_without_delimiter_and_topic(frames: list[bytes], topic: bytes) -> None:
    assert replay_message(frames) == Message(topic, 7, b"p")


@pytest.mark.parametrize("frames", [[b"", b"", END, b""], [b"", END, b""], [END, b""]])
def test_every_form_of_the_end_marker(frames: list[bytes]) -> None:
    assert replay_message(frames) is REPLAY_END


@pytest.mark.parametrize("frames", [[], [b"junk"], [b"", b"short", b"p"], [b""] * 5])
def test_other_replies_are_malformed(frames: list[bytes]) -> None:
    assert replay_message(frames) is None


def test_a_topic_that_is_no_name_is_malformed() -> None:
    assert live_message([b"t" * MAX_TOPIC, SEVEN, b"p"]) is not None
    assert live_message([b"t" * (MAX_TOPIC + 1), SEVEN, b"p"]) is None
    assert replay_message([b"", b"t" * (MAX_TOPIC + 1), SEVEN, b"p"]) is None


def test_a_request_is_an_empty_frame_and_eight_bytes() -> None:
    assert replay_request(7) == [b"", SEVEN]
    assert replay_request(2**64) == [b"", END]


def test_a_snapshot_is_asked_for_by_the_highest_number_of_all() -> None:
    assert replay_request(SNAPSHOT) == [b"", END]
