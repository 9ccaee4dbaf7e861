"""Images at their places among tokens: found in order, refused where their tokens are not, kept by copies and cuts."""

import pickle

import numpy as np
import pytest

from turnwise.chat.images.blocks import place_images
from turnwise.engines.learners.device_batch import within
from turnwise.ledger import Ledger, Media, MediaSpan, Origin, check_places
from turnwise.system.image_bytes import digest_of


def image(name: str, *ids: int) -> Media:
    block = np.array(ids)
    return Media(digest_of(name.encode()), name.encode(), block, block == 9, {"pixel_values": np.zeros((1, 3))})


A, B = image("a", 8, 9, 9, 7), image("b", 9)


def ledger() -> Ledger:
    made = Ledger()
    made.append([1, 8, 8, 9, 9, 7, 2], Origin.PROMPT, 0)
    place_images(made, [A])
    made.append([3, 9], Origin.POLICY, 0, [-0.5, -0.5], 0)  # a policy may write the token of an image: it is none
    made.append([4, 9, 5], Origin.TOOL, 0)
    return made


def test_images_are_found_in_order_behind_each_other():
    made = ledger()
    assert [(span.media, span.start, span.end) for span in made.media] == [(A, 2, 6)]
    assert A.features == 2
    place_images(made, [B])
    assert [span.start for span in made.media] == [2, 10], "the policy's own token of that kind is no image"


def test_an_image_whose_tokens_are_not_there_is_refused_and_leaves_nothing():
    made = ledger()
    with pytest.raises(ValueError, match="no tokens for image"):
        place_images(made, [B, A])
    assert len(made.media) == 1
    with pytest.raises(ValueError, match="not those of image"):
        check_places([MediaSpan(A, 1)], made.token_ids)
    with pytest.raises(ValueError, match="after 6"):
        check_places([MediaSpan(A, 2), MediaSpan(A, 2)], made.token_ids)


def test_copies_and_cuts_keep_images_whole():
    made = ledger()
    copy = pickle.loads(pickle.dumps(made))
    assert copy == made and copy.media[0].media.digest == A.digest
    assert made.prefix(6).media == made.media and made.prefix(5).media == ()
    assert made.prefix(6) != Ledger.of([1, 8, 8, 9, 9, 7], [0] * 6, [0] * 6, [0.0] * 6, [-1] * 6)
    assert within(made.media, 3, 9) == (MediaSpan(A, -1),) and within(made.media, 6, 9) == ()
