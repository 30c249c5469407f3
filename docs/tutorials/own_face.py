"""A face that takes token ids, one request a line over TCP, and answers each with a line of token ids.

Run it with the address of an engine: ``python own_face.py 127.0.0.1:50051 9000``.
"""

import sys
from functools import partial

import trio

from trio_sidecar import wire
from trio_sidecar.bridge import run, run_aio
from trio_sidecar.config import TransportSettings, resolve
from trio_sidecar.engines.remote import open_remote
from trio_sidecar.errors import RpcError


async def aio_answer(engine, prompt, max_new_tokens):
    """Everything that belongs to the stream happens in one coroutine, from opening to closing."""
    request = wire.GenerateRequest(
        token_ids=wire.TokenIds(ids=prompt),
        stopping=wire.StoppingCriteria(max_new_tokens=max_new_tokens),
        response=wire.ResponseOptions(output_token_ids=True),
    )
    answer = []
    async with engine.aio_generate(request, {}) as stream:
        while responses := await stream.aio_receive():
            for response in responses:
                if response.outputs is not None:
                    answer.extend(response.outputs.token_ids)
    return answer


async def handle(engine, connection):
    """One connection is one Trio task: if it is cancelled, so is the request of the engine."""
    rest = b""
    async for data in connection:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            try:
                answer = await run_aio(aio_answer, engine, [int(word) for word in line.split()], 16)
                text = " ".join(map(str, answer))
            except (RpcError, ValueError) as error:
                text = f"error: {error}"
            await connection.send_all(text.encode() + b"\n")


async def main(endpoint, port):
    settings = resolve(TransportSettings, flags={"--grpc-endpoint": endpoint}, environ={})
    async with open_remote(settings) as engine, trio.open_nursery() as nursery:
        await nursery.start(partial(trio.serve_tcp, partial(handle, engine), int(port), host="127.0.0.1"))
        print(f"serving on port {port}", flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    run(main, *sys.argv[1:3])
