"""What is SGLang's own: it is sent token ids and no images, on the port that it was given."""

import asyncio

import pytest
from inference_servers import VOCABULARY, Model, sglang_app
from test_server_images import CAT, TAKES, shown

from turnwise.errors import EngineError
from turnwise.ext.sglang.opener import SglangServer, sglang_command
from turnwise.system.serving import serving_beside


def test_it_is_sent_no_images() -> None:
    async def main() -> None:
        async with serving_beside(sglang_app(Model()), "127.0.0.1") as port:
            server = SglangServer(
                "server 0", f"http://127.0.0.1:{port}", vocabulary=VOCABULARY, decode=str, capabilities=TAKES
            )
            try:
                await server.start()
                with pytest.raises(EngineError, match="reads text only"):
                    await server.generate(shown([1], CAT))
            finally:
                await server.close()

    asyncio.run(main())


def test_its_command_names_the_port_and_options_come_last() -> None:
    command = sglang_command("py", ["--tp", "2"])(7)
    assert command[0] == "py" and "7" in command and command[-2:] == ["--tp", "2"]
