"""An image as a processor might have prepared it, for samplers that must refuse or place it."""

import numpy as np

from turnwise.ledger import Media
from turnwise.system.image_bytes import digest_of

CONTENT = b"\x89PNG\r\n\x1a\n"
AN_IMAGE = Media(digest_of(CONTENT), CONTENT, np.array([1]), np.array([True]), {})
