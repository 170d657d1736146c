"""Who answers: SGLang's own interface, which takes and returns token ids, or any OpenAI-compatible chat endpoint."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from specfleet.contracts.errors import ConfigError, ContractError, HostError
from specfleet.data.conversation import Message, RowRejected
from specfleet.data.regenerate.endpoint import Endpoint
from specfleet.data.render import ChatRenderer
from specfleet.target.facts import read_text_facts, tokenizer_hash


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn. template_kwargs reach the chat template, e.g. {"enable_thinking": false}."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 2048
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Answer:
    """text as the engine gives it; finish: stop, length or the engine's own word. ids end with the stop token, if any."""

    text: str
    finish: str
    reasoning: str = ""
    prompt_ids: list[int] | None = None
    ids: list[int] | None = None
    tokens: int = 0


class AnswerEngine(Protocol):
    """`model` is named in every row."""

    @property
    def model(self) -> str: ...

    async def answer(self, messages: list[Message]) -> Answer:
        """The next assistant turn. Raises RowRejected when this conversation cannot be answered, HostError otherwise."""
        ...


class SglangEngine:
    """Token ids in, token ids out: the prompt is rendered here, with the renderer that training uses."""

    def __init__(self, endpoint: Endpoint, renderer: ChatRenderer, model: str, sampling: Sampling) -> None:
        self._endpoint, self._renderer, self.model = endpoint, renderer, model
        self._parameters = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_new_tokens": sampling.max_tokens,
            "stop_token_ids": sorted(renderer.stop_ids),
        }

    @classmethod
    async def connect(cls, endpoint: Endpoint, target: str | Path, model: str, sampling: Sampling) -> "SglangEngine":
        """Raises ConfigError SF-REGEN-ENGINE (not SGLang), ContractError SF-REGEN-TARGET (another tokenizer), SF-TARGET-*."""
        info = await endpoint.get("/model_info")
        if info is None or "model_path" not in info:
            raise ConfigError(
                "SF-REGEN-ENGINE",
                f"{endpoint.url} is not an SGLang server, so it cannot be given token ids. Leave --target out to use its "
                "OpenAI-compatible interface",
            )
        facts, served = read_text_facts(target), Path(str(info["model_path"]))
        ours = tokenizer_hash(target)
        # A model path of another machine says nothing here.
        if served.is_dir() and (theirs := tokenizer_hash(served)) != ours:
            raise ContractError(
                "SF-REGEN-TARGET",
                f"{endpoint.url} serves {served} with tokenizer {theirs}; the target {target} has {ours}: its token ids "
                "would mean something else there",
            )
        renderer = ChatRenderer.load(Path(target), facts.vocab_size, facts.eos_token_ids)
        renderer.template_kwargs = dict(sampling.template_kwargs)
        return cls(endpoint, renderer, model or Path(target).resolve().name, sampling)

    async def answer(self, messages: list[Message]) -> Answer:
        prompt = self._renderer.prompt_ids(messages)
        body = {"input_ids": prompt, "sampling_params": self._parameters}
        document = await self._endpoint.post("/generate", body)
        try:
            reason = document["meta_info"]["finish_reason"]
            ids, text, finish = list(document["output_ids"]), str(document["text"]), str(reason["type"])
        except (KeyError, TypeError) as error:
            raise HostError(
                "SF-REGEN-ENGINE",
                f"{self._endpoint.url}/generate answers in an unknown form: {error!r} in {sorted(document)}",
            ) from error
        if finish == "abort":
            raise RowRejected("endpoint_refused", f"aborted: {reason.get('message', '')}")
        return Answer(text, finish, prompt_ids=prompt, ids=ids, tokens=len(ids))


class OpenAIEngine:
    """Chat completions. Token ids come only from vLLM, which returns them when asked; others refuse the question."""

    def __init__(self, endpoint: Endpoint, model: str, sampling: Sampling, ask_for_ids: bool = False) -> None:
        self._endpoint, self.model = endpoint, model
        self._body: dict[str, Any] = {
            "model": model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
        }
        if sampling.template_kwargs:
            self._body["chat_template_kwargs"] = sampling.template_kwargs
        if ask_for_ids:
            self._body["return_token_ids"] = True

    @classmethod
    async def connect(cls, endpoint: Endpoint, model: str, sampling: Sampling) -> "OpenAIEngine":
        """model: "" takes the only one served. Raises ConfigError SF-REGEN-MODEL."""
        listed = await endpoint.get("/v1/models")
        models = {str(item.get("id")): str(item.get("owned_by")) for item in (listed or {}).get("data", [])}
        if not model and len(models) != 1:
            shown = ", ".join(sorted(models)) or "no model"
            raise ConfigError("SF-REGEN-MODEL", f"{endpoint.url} serves {shown}: choose one with --model")
        name = model or next(iter(models))
        return cls(endpoint, name, sampling, ask_for_ids=models.get(name) == "vllm")

    async def answer(self, messages: list[Message]) -> Answer:
        document = await self._endpoint.post("/v1/chat/completions", self._body | {"messages": messages})
        try:
            choice = document["choices"][0]
            message = choice["message"]
        except (KeyError, IndexError, TypeError) as error:
            raise HostError(
                "SF-REGEN-ENGINE", f"{self._endpoint.url} answers in an unknown form: {error!r} in {sorted(document)}"
            ) from error
        return Answer(
            text=message.get("content") or "",
            finish=str(choice.get("finish_reason") or ""),
            reasoning=message.get("reasoning_content") or message.get("reasoning") or "",
            prompt_ids=document.get("prompt_token_ids"),
            ids=choice.get("token_ids"),
            tokens=int((document.get("usage") or {}).get("completion_tokens") or 0),
        )
