"""Thoughts between <think> tags, for the formats that write them so."""

THINK, UNTHINK = "<think>", "</think>"
STOPS: tuple[str, ...] = ()
CALL_ENDS: tuple[str, ...] = ()
"""Of a format whose turns end as the chat template ends them."""
ANSWER = ""
"""Of a format that writes nothing before an answer."""


def render_thought(thought: str, *, is_open: bool) -> str:
    """The text of a thought; `is_open` when the prompt opened it."""
    return thought_text(thought, THINK, UNTHINK, is_open=is_open)


def thought_text(thought: str, think: str, unthink: str, *, is_open: bool) -> str:
    """The text of a thought between these tags; an open one has its first tag already."""
    opening = "" if is_open else f"{think}\n"
    return f"{opening}{thought}\n{unthink}\n\n"


def split_thoughts(text: str, in_reasoning: bool) -> tuple[list[str], str]:
    """(thoughts, everything else). A thought that is never closed goes on to the end."""
    thoughts, rest, position = [], [], 0
    thinking = in_reasoning and not text.lstrip().startswith(THINK)
    while position < len(text):
        mark = UNTHINK if thinking else THINK
        end = text.find(mark, position)
        piece = text[position : end if end >= 0 else None]
        if thinking:
            thoughts.append(piece.strip())
        elif UNTHINK in piece:  # closed without being opened: all before was thought
            before, _, after = piece.rpartition(UNTHINK)
            thoughts.append(before.strip())
            rest.append(after)
        else:
            rest.append(piece)
        if end < 0:
            break
        position, thinking = end + len(mark), not thinking
    return thoughts, "".join(rest)
