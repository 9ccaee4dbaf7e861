"""Python sessions for untrusted code, behind an asyncio interface; knows nothing about language models.

async with SandboxPool() as pool:
    async with await pool.session(seed=7) as session:
        result = await session.run("x = 6\nx * 7")  # Status.OK, value "42"
"""
