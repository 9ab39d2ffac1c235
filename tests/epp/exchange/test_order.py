"""Whatever comes, in whatever order: the replies keep to one grammar, and there is exactly one `Finish`."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.errors import Code, Refusal
from epp.exchange import actions as act
from epp.exchange import events as ev
from epp.exchange.chunks import MAX_CHUNK
from epp.exchange.events import BodyMode
from epp.exchange.machine import Exchange, PeerError
from epp.routing import Answer, Observe, RequestHead, ResponseHead, Route

LETTERS = {
    act.AckRequestHeaders: "a",
    act.PickEndpoint: "p",
    act.RouteRequest: "R",
    act.ForwardRequestBody: "b",
    act.AckRequestBody: "",  # wherever a body comes that was not to come
    act.ForwardRequestTrailers: "t",
    act.AskDirector: "d",
    act.ForwardResponseHeaders: "H",
    act.ForwardResponseBody: "c",
    act.AckResponseBody: "c",
    act.ObserveBody: "o",
    act.ForwardResponseTrailers: "T",
    act.Reject: "X",
    act.Finish: "F",
}
# request body and trailers may still flow while the response does (upgrades)
GRAMMAR = re.compile(r"a?(p?X|p(Rb*t*(dH[bt]*(o?[cT][bt]*)*)?)?|p?H[btcT]*)?F?")
ROUTE = Route("10.0.0.7:8000")


def heads() -> st.SearchStrategy[RequestHead]:
    headers = st.sampled_from([{}, {"upgrade": "websocket"}, {"expect": "100-continue"}])
    return st.builds(RequestHead, headers, st.just(1.0), st.booleans())


def peer_events() -> st.SearchStrategy[ev.Event]:
    data, flag = st.sampled_from([b"", b"x", b"x" * (MAX_CHUNK + 1)]), st.booleans()
    modes = st.sampled_from([BodyMode.NONE, BodyMode.STREAMED, BodyMode.BUFFERED, BodyMode.DUPLEX])
    # mostly what a data plane sends, so that deep states are reached
    return st.one_of(
        st.builds(ev.RequestHeaders, heads(), modes, modes),
        st.builds(ev.RequestBody, data, flag),
        st.builds(ev.RequestBody, data, flag),
        st.builds(ev.RequestTrailers),
        st.builds(ev.ResponseHeaders, st.just(ResponseHead(200, {}, at=2.0)), flag),
        st.builds(ev.ResponseBody, data, flag, st.just(3.0)),
        st.builds(ev.ResponseBody, data, flag, st.just(3.0)),
        st.builds(ev.ResponseTrailers, st.just(4.0)),
    )


def legal_starts() -> st.SearchStrategy[list[ev.Event]]:
    modes = st.sampled_from([BodyMode.BUFFERED, BodyMode.DUPLEX])
    start = st.builds(ev.RequestHeaders, heads(), modes, modes)
    return st.builds(
        lambda first, *rest: [first, *rest],
        start,
        st.just(ev.RequestBody(b"body", True)),
        st.builds(ev.ResponseHeaders, st.just(ResponseHead(200, {}, at=2.0)), st.just(False)),
    )


class Player:
    """A driver with a scripted director; keeps what the exchange asked for."""

    def __init__(self, picks: Refusal | None, observe: Observe) -> None:
        self.exchange = Exchange(max_request_bytes=3 * MAX_CHUNK)
        self.actions: list[act.Action] = []
        self._refusal = picks
        self._observe = observe

    def feed(self, event: ev.Event) -> None:
        for action in self.exchange.receive(event):
            self.actions.append(action)
            if isinstance(action, act.PickEndpoint):
                picked = ev.PickRefused(self._refusal) if self._refusal else ev.EndpointPicked(ROUTE)
                self.feed(picked)
            elif isinstance(action, act.AskDirector):
                self.feed(ev.AnswerGiven(Answer(self._observe)))

    @property
    def word(self) -> str:
        return "".join(LETTERS[type(action)] for action in self.actions)


players = st.builds(
    Player, st.sampled_from([None, None, None, Refusal(Code.BadRequest, "no")]), st.sampled_from(list(Observe))
)


@given(players, st.one_of(legal_starts(), st.just([])), st.lists(peer_events(), max_size=8), st.booleans())
def test_any_order_of_events_keeps_the_grammar_and_finishes_once(player, start, rest, failed):
    events = [*start, *rest]
    for event in events:
        try:
            player.feed(event)
        except PeerError:
            break
        if player.actions and isinstance(player.actions[-1], act.Reject):
            break
    player.feed(ev.StreamClosed(9.0, failed))
    assert GRAMMAR.fullmatch(player.word), player.word
    seen_headers = bool(events) and isinstance(events[0], ev.RequestHeaders)
    assert player.word.count("F") == seen_headers


@given(players, st.lists(peer_events(), max_size=6))
def test_a_body_comes_out_as_it_went_in(player, rest):
    pieces = [event.data for event in rest if isinstance(event, ev.RequestBody)]
    head = RequestHead({}, 1.0)
    player.feed(ev.RequestHeaders(head, BodyMode.DUPLEX, BodyMode.DUPLEX))
    for piece in pieces:
        player.feed(ev.RequestBody(piece, False))
        if player.word.endswith("X"):
            return  # over the limit
    player.feed(ev.RequestBody(b"", True))
    forwarded = [action for action in player.actions if isinstance(action, act.ForwardRequestBody)]
    if player.word.endswith("X"):
        assert not forwarded
    else:
        assert b"".join(action.data for action in forwarded) == b"".join(pieces)
        assert [action.end_of_stream for action in forwarded] == [False] * (len(forwarded) - 1) + [True]


@pytest.mark.parametrize("cut", ["whole", "bytes", "borders"])
def test_the_same_body_cut_in_any_way_is_picked_and_forwarded_alike(cut):
    body = bytes(i % 251 for i in range(300))
    cuts = {"whole": [body], "bytes": [bytes([b]) for b in body], "borders": [body[:100], b"", body[100:]]}
    player = Player(None, Observe.NOTHING)
    player.feed(ev.RequestHeaders(RequestHead({}, 1.0)))
    for piece in cuts[cut]:
        player.feed(ev.RequestBody(piece, False))
    player.feed(ev.RequestBody(b"", True))
    pick, route, forward = player.actions
    assert isinstance(pick, act.PickEndpoint)
    assert pick.body == body
    assert route == act.RouteRequest(ROUTE, act.Phase.HEADERS)
    assert forward == act.ForwardRequestBody(body, True)
