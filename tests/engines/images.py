"""An image as a processor might have prepared it, for samplers that must refuse or place it."""

import numpy as np

from turnwise.media import Media, digest_of

CONTENT = b"\x89PNG\r\n\x1a\n"
AN_IMAGE = Media(digest_of(CONTENT), CONTENT, np.array([1]), np.array([True]), {})
