"""How long a request waited: for its row, and while weights were replaced; on a clock that is moved by hand."""

import numpy as np
from waits import assert_the_second_waits_for_the_first

from turnwise.engines.model.decoder import Decoder
from turnwise.engines.samplers.cpu.batching import Batcher
from turnwise.engines.samplers.cpu.threads import REGIMES
from turnwise.engines.samplers.in_flight import QueuedRequest
from turnwise.engines.samplers.request import SamplingParams
from turnwise.engines.weight_updates import FullWeights


def request(name, tokens):
    return QueuedRequest(name, np.arange(5, dtype=np.int64), SamplingParams(max_tokens=tokens), 1)


def test_a_request_waits_until_it_has_a_row(decoder: Decoder, now) -> None:
    batcher = Batcher(decoder, str, REGIMES[0], 1, 0, 0)
    first, second = request("a", 3), request("b", 2)
    assert_the_second_waits_for_the_first(batcher, first, second, now)


def test_new_weights_pause_those_that_write(decoder: Decoder, now, monkeypatch) -> None:
    batcher = Batcher(decoder, str, REGIMES[0], 1, 0, 0)
    writes, waits = request("a", 50), request("b", 2)
    batcher.submit(writes)
    batcher.step()
    batcher.submit(waits)
    seen = []

    def load(weights):
        now[0] += 30.0
        seen.append((batcher.waited(writes), batcher.waited(waits)))

    monkeypatch.setattr(decoder, "load", load)
    batcher.publish(FullWeights(decoder.weight_shapes(), decoder.weights()), 1)
    now[0] += 5.0
    assert seen == [(30.0, 30.0)], "also in the middle of it"
    assert (batcher.waited(writes), batcher.waited(waits)) == (30.0, 35.0)


def test_sleep_pauses_everybody_and_new_weights_in_it_pause_nobody_twice(decoder: Decoder, now) -> None:
    batcher = Batcher(decoder, str, REGIMES[0], 1, 0, 0)
    writes, waits = request("a", 50), request("b", 2)
    batcher.submit(writes)
    batcher.step()
    batcher.submit(waits)
    batcher.sleep()
    now[0] = 7.0
    batcher.sleep()
    assert (batcher.waited(writes), batcher.waited(waits)) == (7.0, 7.0)
    batcher.publish(FullWeights(decoder.weight_shapes(), decoder.weights()), 1)
    now[0] = 10.0
    batcher.wake()
    batcher.wake()
    now[0] = 30.0
    assert (batcher.waited(writes), batcher.waited(waits)) == (10.0, 30.0)


def test_requests_decode_together(decoder: Decoder, now) -> None:
    """Two requests of three and five tokens together: the first token of each comes with its prompt."""
    batcher = Batcher(decoder, str, REGIMES[0], 2, 0, 0)
    for name, tokens in (("a", 3), ("b", 5)):
        batcher.submit(request(name, tokens))
    steps = 0
    while not batcher.idle:
        batcher.step()
        steps += 1
    assert (steps, batcher.stats.decoded_tokens) == (4, 8)
