"""The Arrow schemas of trajectory files, in every format that is read.

Format 7 has columns for remarks, branches, reuse, images and facts. In 3 to 6 they lie among the artifacts, under keys
of their own (`older_rows`).
"""

import pyarrow as pa

from turnwise.storage.trajectories.ledger_columns import LEDGER, LEDGERS, MEDIA

VERSION = "7"
VERSION_KEY = b"turnwise.trajectories"

_JSON = pa.string()  # a JSON text: values whose shape only their writer knows

_CALL = pa.struct([("id", pa.string()), ("name", pa.string()), ("arguments", _JSON), ("problem", pa.string())])
_PART = pa.struct([("kind", pa.string()), ("value", pa.string())])
_MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("text", pa.string()),  # null when the content comes in parts
        ("parts", pa.list_(_PART)),
        ("tool_calls", pa.list_(_CALL)),
        ("tool_call_id", pa.string()),
        ("name", pa.string()),
        ("reasoning", pa.string()),
        ("answer", pa.string()),
    ]
)
_RECORD = pa.struct(
    [
        ("call", _CALL),
        ("status", pa.string()),
        ("seconds", pa.float64()),
        ("truncated", pa.bool_()),
        ("score", pa.float64()),
        ("info", _JSON),
    ]
)
_TURN = pa.struct(
    [
        ("index", pa.int32()),
        ("message", _MESSAGE),
        ("finish_reason", pa.string()),
        ("policy_version", pa.int64()),
        ("prompt_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("segment", pa.int32()),
        ("start", pa.int32()),
        ("calls", pa.list_(_RECORD)),
        ("replies", pa.list_(_MESSAGE)),
        ("user_score", pa.float64()),
        ("scores", pa.map_(pa.string(), pa.float64())),
        ("generate_seconds", pa.float64()),
        ("reply_seconds", pa.float64()),
    ]
)
_REMARK = pa.struct([("by", pa.string()), ("text", pa.string()), ("value", pa.float64()), ("turn", pa.int32())])
_BRANCH = pa.struct(
    [
        ("name", pa.string()),
        ("trained", pa.bool_()),
        ("messages", pa.list_(_MESSAGE)),
        ("turns", pa.list_(_TURN)),
    ]
)
_ENVIRONMENT = pa.struct(
    [
        ("reward", pa.float64()),
        ("finished", pa.bool_()),
        ("metrics", pa.map_(pa.string(), pa.float64())),
        ("left_open", pa.string()),
    ]
)
_FACTS = pa.struct(
    [
        ("environment", _ENVIRONMENT),
        ("user_score", pa.float64()),
        ("user_notes", _JSON),
        ("tool_rewards", pa.map_(pa.string(), pa.float64())),
        ("agent_error", pa.string()),
        ("ignored_requests", pa.list_(pa.string())),
        ("engine_lost", pa.list_(pa.string())),
    ]
)
_CHECK = [("exact", pa.bool_()), ("same_text", pa.bool_()), ("position", pa.int64())]
_WORDS = [
    ("sample_id", pa.string()),
    ("data_source", pa.string()),
    ("step", pa.int64()),
    ("sibling", pa.int32()),
    ("stop_reason", pa.string()),
    ("failure", pa.string()),
    ("reward", pa.float64()),
    ("parts", pa.map_(pa.string(), pa.float64())),
    ("advantage", pa.float64()),
    ("first_right", pa.bool_()),
    ("seconds", pa.float64()),
    ("prompt", pa.list_(_MESSAGE)),
    ("ground_truth", _JSON),
    ("agent", pa.string()),
    ("tools", pa.list_(pa.string())),
    ("tools_kwargs", _JSON),
    ("interaction", pa.struct([("name", pa.string()), ("kwargs", _JSON)])),
    ("images", pa.list_(pa.string())),
    ("info", _JSON),
    ("messages", pa.list_(_MESSAGE)),
    ("turns", pa.list_(_TURN)),
    ("segments", pa.list_(LEDGER)),
    ("artifacts", _JSON),
]
SCHEMA = pa.schema(
    [
        *_WORDS,
        ("render_check", pa.struct([*_CHECK, ("problem", pa.string())])),
        ("facts", _FACTS),
        ("remarks", pa.list_(_REMARK)),
        ("branches", pa.list_(_BRANCH)),
        ("reused_from", pa.int64()),
        ("media", pa.list_(pa.list_(MEDIA))),
    ],
    metadata={VERSION_KEY: VERSION},
)
SEGMENTS = SCHEMA.get_field_index("segments")
_OLDER = pa.schema([*_WORDS, ("render_check", pa.struct(_CHECK))])
SCHEMAS = {VERSION: SCHEMA} | {
    version: _OLDER.set(SEGMENTS, pa.field("segments", pa.list_(ledger))).with_metadata({VERSION_KEY: version})
    for version, ledger in LEDGERS.items()
    if version != VERSION
}
"""Every format that is read."""
