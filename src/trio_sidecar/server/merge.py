"""The unary answer made of a stream's answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_sidecar.errors import RpcError, StatusCode
from trio_sidecar.wire import GenerateResponse, PromptInfo, SequenceOutput

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Merger"]


class Merger:
    """Collects a stream into the one answer of ``Generate``."""

    def __init__(self) -> None:
        self._prompt_info: PromptInfo | None = None
        self._texts: list[str] = []
        self._output = SequenceOutput()
        self._finished = False

    def add(self, answers: Iterable[GenerateResponse]) -> None:
        """Take the next answers of the stream."""
        merged = self._output
        for answer in answers:
            if answer.prompt_info is not None:
                self._prompt_info = answer.prompt_info
            output = answer.outputs
            if output is None:
                continue
            self._texts.append(output.text)
            merged.index = output.index
            merged.num_tokens += output.num_tokens
            merged.token_ids.extend(output.token_ids)
            merged.logprobs.extend(output.logprobs)
            merged.ranks.extend(output.ranks)
            merged.candidate_tokens.extend(output.candidate_tokens)
            merged.sampling_mask.extend(output.sampling_mask)
            if output.finish_info is not None:
                merged.finish_info = output.finish_info
                self._finished = True

    def result(self) -> GenerateResponse:
        """The whole answer.

        Raises:
            RpcError: INTERNAL, the stream ended without a finish.
        """
        if not self._finished:
            raise RpcError(StatusCode.INTERNAL, "the engine's stream ended without finish_info")
        self._output.text = "".join(self._texts)
        return GenerateResponse(prompt_info=self._prompt_info, outputs=self._output)
