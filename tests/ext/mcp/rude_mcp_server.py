"""An MCP server of raw lines, which answers as no honest one would: `python rude_mcp_server.py LIST`."""

import json
import sys

OBJECT = {"type": "object", "properties": {}}
TOOLS = {
    "good": [{"name": name, "description": "A tool.", "inputSchema": OBJECT} for name in (
        "no_city", "surrogate", "deep", "wrong", "closed", "chatty", "fine", "bare", "large")],
    "properties": [{"name": "a", "inputSchema": {"type": "object", "properties": 5}}],
    "list": [{"name": "a", "inputSchema": [1]}],
    "nameless": [{"inputSchema": OBJECT}],
    "empty": [{"name": "", "inputSchema": OBJECT}],
    "twice": [{"name": "a", "inputSchema": OBJECT}, {"name": "a", "inputSchema": OBJECT}],
    "number": 5,
    "many": [{"name": f"t{i}", "inputSchema": OBJECT} for i in range(5000)],
    "huge": [{"name": "a", "inputSchema": {"type": "object", "description": "x" * 3_000_000}}],
    "type": [{"name": "a", "inputSchema": {"type": "object", "properties": {"b": {"type": "objekt"}}}}],
    "endless": [{"name": "a", "inputSchema": {"type": "object", "$ref": "#/$defs/" + "x" * 10}}],
}  # fmt: skip


def text(words):
    return {"content": [{"type": "text", "text": words}]}


def answer(message):
    number, method = message.get("id"), message.get("method")
    if number is None:
        return None
    head = {"jsonrpc": "2.0", "id": number}
    if method == "initialize":
        version = message["params"]["protocolVersion"]
        info = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "r", "version": "1"}}
        return json.dumps({**head, "result": info})
    if method == "tools/list":
        if sys.argv[1] == "surrogate":
            return f'{{"jsonrpc": "2.0", "id": {number}, "result": {{"tools": [{{"name": "a\\ud800"}}]}}}}'
        return json.dumps({**head, "result": {"tools": TOOLS[sys.argv[1]]}})
    if method != "tools/call":
        return json.dumps({**head, "error": {"code": -32601, "message": "no such method"}})
    begin = f'{{"jsonrpc": "2.0", "id": {number}, "result": {{"content": [{{"type": "text", "text": '
    return {
        "no_city": json.dumps({**head, "error": {"code": -32000, "message": "no such city"}}),
        "closed": json.dumps({**head, "error": {"code": -32000, "message": "Connection closed"}}),
        "surrogate": begin + '"a \\ud800 b"}]}}',
        "deep": begin + '"a"}], "structuredContent": ' + '{"a":' * 50_000 + "1" + "}" * 50_000 + "}}",
        "wrong": json.dumps({**head, "result": {"content": 5}}),
        "bare": json.dumps({**head, "neither": 1}),
        "chatty": 'Loading the "id": 7 index ...\n' + json.dumps({**head, "result": text("ready")}),
        "fine": json.dumps({**head, "result": text("fine")}),
        "large": json.dumps({**head, "result": text("y" * 3_000_000)}),
    }[message["params"]["name"]]


for line in sys.stdin:
    if (said := answer(json.loads(line))) is not None:
        sys.stdout.write(said + "\n")
        sys.stdout.flush()
