"""The grid, the directions and the replies of the `look` tool, for whoever writes its calls without running it."""

STEPS, VIEW = 16, 64
TURNS = (90, 180, 270)
SEEN = "seen"
NOWHERE = f"this box is no region of the image: x1 < x2 and y1 < y2, from 0 to {STEPS}"
