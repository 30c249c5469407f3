"""An engine that answers with the tokens of the prompt, as a vLLM gRPC server on 127.0.0.1:50051."""

from contextlib import asynccontextmanager, nullcontext

from trio_sidecar import wire
from trio_sidecar.bridge import run
from trio_sidecar.config import ServerSettings
from trio_sidecar.engines.mock_tokenizer import MOCK_MODEL_DIR, MockTokenizer
from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.server import run_server

TOKENIZER = MockTokenizer.load()
FACTS = {
    "GetModelInfo": wire.ModelInfo(
        model_id=str(MOCK_MODEL_DIR), served_model_name="echo", supports_token_ids_input=True
    ),
    "GetServerInfo": wire.ServerInfo(engine_version="echo-1", api_version="vllm", max_model_len=4096),
    "GetKvEventSources": wire.GetKvEventSourcesResponse(),
}


class Echo:
    @asynccontextmanager
    async def aio_generate(self, request, metadata):
        if not (request.token_ids and request.token_ids.ids):
            raise RpcError(StatusCode.INVALID_ARGUMENT, "this engine takes token ids")
        prompt, limit = request.token_ids.ids, request.stopping.max_new_tokens if request.stopping else 0
        answer = [wire.SequenceOutput(token_ids=[i], num_tokens=1, text=TOKENIZER.decode([i])) for i in prompt]
        yield Answers(len(prompt), answer[: limit or None])

    async def aio_call(self, method, request):
        if method.name not in FACTS:
            raise RpcError(StatusCode.UNIMPLEMENTED, f"{method.name} is not supported", rpc=method.name)
        return FACTS[method.name]

    async def aio_check_health(self, service):
        return wire.HealthCheckResponseServingStatus.SERVING


class Answers:
    def __init__(self, num_prompt_tokens, outputs):
        end = wire.FinishInfo(num_output_tokens=len(outputs), finish_reason=wire.FinishInfoFinishReason.LENGTH)
        outputs[-1].finish_info = end
        self._left = [wire.GenerateResponse(outputs=output) for output in outputs]
        self._left[0].prompt_info = wire.PromptInfo(num_prompt_tokens=num_prompt_tokens)

    async def aio_receive(self):
        return [self._left.pop(0)] if self._left else []


if __name__ == "__main__":
    run(run_server, nullcontext(Echo()), ServerSettings(), print)
