"""placement: server. A model behind one URL, or behind several replicas.

Generative judges: /v1/chat/completions with messages, which the server renders; /v1/completions with complete prompts. If the
recipe names a tokenizer or a chat template, messages are rendered here and sent as tokens.

Scalar models: /classify of vLLM and of SGLang, which differ. Conversations are rendered with the model's template and sent as
tokens, so no server adds a second BOS token. If its tokenizer cannot be loaded, vLLM gets the messages and renders them. Not
used: vLLM's /score, which encodes pairs with its own special tokens, and SGLang's /v1/classify, whose softmax turns a single score
into 1.
"""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from plaudit.errors import PlauditError, RecipeError, did_you_mean
from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.reward_models import RewardModel
from plaudit.redaction import redact, redact_all
from plaudit.report.progress import print_line
from plaudit.reward_models.backend import CONTEXT, Answer, Backend, GenerationRequest, ModelInfo, SamplingParams, ScalarScore
from plaudit.reward_models.connection import Connection, Fault, Garbage, TooLong, key_hint, quote_error
from plaudit.reward_models.replicas import Replica, Replicas
from plaudit.seeding import stable_seed
from plaudit.types import Failure, Message

if TYPE_CHECKING:
    from plaudit.data.templates import ChatTemplate

Item = TypeVar("Item")
Result = TypeVar("Result")
PROBE: list[Message] = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "2"}]
FIRST_ANSWER_S = 10.0
"""Time limit for listing the models of a server."""
MAX_SCORE = 1e15
"""Of a scalar model. Sums and squares of larger numbers are soon infinite."""
MAX_TOKENS = 10**9
"""Of one call, as its server may count them."""
NO_TRUNCATION = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Overrides the model's generation_config.json, which vLLM and SGLang read: answers must not depend on the placement."""


class ServerClient(Backend):
    def __init__(
        self,
        model: RewardModel,
        limits: ModelLimits = ModelLimits(),  # noqa: B008 (frozen)
        *,
        urls: Sequence[str] = (),
        scalar: bool = False,
        wait_s: float = 0.0,
        key: str = "",
    ):
        """`urls`: instead of the recipe's. `scalar`: the model scores and does not generate. `wait_s`: how long `open` waits for
        the servers. `key`: theirs, instead of the one that the recipe's `credential` names."""
        self.model, self.scalar, self._wait_s = model, scalar, wait_s
        self._connection = Connection(Replicas(urls or model.url), limits, model.credential, key)
        self._template: ChatTemplate | None = None
        self._served_path = model.path if model.placement == "server" else None
        self.usage = self._connection.usage

    # Opening ----------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        if self.scalar and self.model.dialect == "openai":
            raise RecipeError("dialect: openai has no endpoint for scalar models; use dialect: vllm or sglang")
        await self._connection.__aenter__()
        try:
            replicas = self._connection.replicas.all
            problems = await self._find_models()
            working = next(replica for replica, problem in zip(replicas, problems, strict=True) if not problem)
            for replica, problem in zip(replicas, problems, strict=True):
                if problem:  # the others serve meanwhile, and this one may come up later
                    replica.model, replica.weights, replica.max_tokens = working.model, working.weights, working.max_tokens
                    replica.failed(gone=True)
                    print_line(f"warning: {problem}")
            if self.scalar or self.model.tokenizer or self.model.chat_template:
                await self._load_template()
            if self.scalar:
                await self._probe()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self._connection.close()

    async def require_server(self) -> ModelInfo:
        """The model that is served. Raises a RecipeError unless a server answers, has it and accepts the key. Not opened after
        that."""
        await self._connection.__aenter__()
        try:
            problems = await self._find_models()
        finally:
            await self.close()
        return self._info(self._connection.replicas.all[problems.index(None)])

    async def _find_models(self) -> list[str | None]:
        """Each server's problem, if it has one. Raises if all of them do."""
        problems = await asyncio.gather(*map(self._identify, self._connection.replicas.all))
        if all(problems):
            raise RecipeError(next(problem for problem in problems if problem))
        return list(problems)

    @property
    def name(self) -> str:
        replica = self._connection.replicas.all[0]
        return redact(replica.model or self.model.path or replica.root)

    async def _identify(self, replica: Replica) -> str | None:
        """Find the model's served name; returns the problem if that fails for now. Raises if it will never succeed."""
        deadline = time.monotonic() + self._wait_s
        while True:
            response = await self._connection.send(replica, "/v1/models", FIRST_ANSWER_S)
            if isinstance(response, Fault):
                problem = f"{replica.url('/v1/models')}: {response.message}"
            elif response[0] == 200:
                self._read_models(replica, response[1])
                return None
            elif response[0] in (404, 405) and self._served_path:  # not every gateway lists its models
                replica.model = self._served_path
                return None
            else:
                problem = f"{replica.url('/v1/models')}: {quote_error(*response)}"
                if response[0] in (401, 403):
                    raise RecipeError(f"{problem} {key_hint(self.model.credential)}")
            if time.monotonic() >= deadline:
                return redact(problem)
            await asyncio.sleep(0.25)

    def _read_models(self, replica: Replica, raw: bytes) -> None:
        where = replica.url("/v1/models")
        try:
            served = {str(entry["id"]): entry for entry in json.loads(raw)["data"]}
            models = [name for name, entry in served.items() if not entry.get("parent")]  # adapters have a parent
            name = self._served_path if self._served_path is not None else models[0]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            raise RecipeError(f"{where}: not a list of models. Is this an OpenAI-compatible server?") from None
        if self._served_path is None and len(models) > 1:
            raise RecipeError(f"{where}: it serves several models; set model.path to one of {_listed(models)}")
        if name not in served and self.model.dialect == "vllm":
            raise RecipeError(f"{where}: no model {name} (it serves: {_listed(list(served))}).{did_you_mean(name, served)}")
        replica.model = name
        entry = served.get(name, {})
        longest, weights = entry.get("max_model_len"), entry.get("root")
        replica.max_tokens = longest if type(longest) is int and longest > 0 else None
        replica.weights = weights if isinstance(weights, str) else ""

    async def _load_template(self) -> None:
        from plaudit.data.templates import load_template, load_tokenizer

        replica = self._connection.replicas.all[0]
        # A served name may be an alias, and another model's name on the hub; the server's `root` is not.
        source = (
            self.model.tokenizer or (self.model.path if self._served_path is None else None) or replica.weights or replica.model
        )
        required = bool(self.model.tokenizer or self.model.chat_template or self.model.dialect != "vllm" or Path(source).is_dir())

        def load() -> "ChatTemplate":
            if not required and not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
                raise RecipeError(f"{source} is neither a local folder nor a name on the hub")
            tokenizer = load_tokenizer(source, trust_remote_code=self.model.trust_remote_code)
            return load_template(tokenizer, self.model.chat_template)

        try:
            self._template = await asyncio.to_thread(load)
        except RecipeError as error:
            if required:
                raise RecipeError(f"{error} (conversations are rendered by plaudit: set tokenizer to the model's folder)") from None
            print_line(f"{error}; the server at {replica.root} renders the conversations instead")

    async def _probe(self) -> None:
        """Score one conversation, before a run depends on it. Not counted."""
        [score] = await self.score([PROBE])
        if score.failure is not None:
            raise RecipeError(f"the model does not score: {score.failure.message}")
        if score.too_long:
            raise RecipeError(f"{self.model.path}: not even {PROBE[0]['content']!r} fits into max_prompt_tokens")
        usage = self.usage
        usage.calls = usage.retries = usage.prompt_tokens = 0
        usage.seconds = 0.0
        usage.faults.clear()

    @property
    def answered_at(self) -> float:
        """When a server last answered a call, on the monotonic clock."""
        return max(replica.answered_at for replica in self._connection.replicas.all)

    async def control(self, path: str, body: Mapping[str, Any], limit_s: float) -> Fault | None:
        """Have the only server do what this path is for; why not, if it does not."""
        [replica] = self._connection.replicas.all
        response = await self._connection.send(replica, path, limit_s, body)
        if isinstance(response, Fault) or response[0] == 200:
            return response if isinstance(response, Fault) else None
        return Fault("http", quote_error(*response))

    async def responds(self, limit_s: float) -> bool:
        """Whether the only server answers the shortest of calls, which is not counted."""
        [replica] = self._connection.replicas.all
        path, body = self._shortest_call()
        answered = not isinstance(await self._connection.send(replica, path, limit_s, {"model": replica.model, **body}), Fault)
        if answered:
            replica.answered()
        return answered

    def _shortest_call(self) -> tuple[str, dict[str, Any]]:
        """Its path and its body."""
        if self.scalar:
            return "/classify", self._scoring(PROBE, self._template and self._template.conversation_tokens(PROBE))[0]
        return self._generation(GenerationRequest([], text="1"), None, SamplingParams(max_new_tokens=1))

    def info(self) -> ModelInfo:
        return self._info(self._connection.replicas.all[0])

    def _info(self, replica: Replica) -> ModelInfo:
        return ModelInfo(self._template, replica.max_tokens, redact(replica.model), redact(replica.weights))

    # Answers ----------------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Answer]:
        prompts: Sequence[list[int] | Failure | None] = [request.tokens for request in requests]
        if self._template is not None:
            prompts = await asyncio.to_thread(self._prompts, requests)
        pairs = list(zip(requests, prompts, strict=True))
        answers = await self._each(pairs, lambda pair: self._write(*pair, params))
        if self._connection.replicas.all[0].max_tokens is None and all(answer.refused for answer in answers):
            # Its context length is unknown: more likely max_new_tokens leaves no room in it than every prompt is too long.
            message = (
                f"the server rejects every prompt with max_new_tokens {params.max_new_tokens} as too long for its context. Lower "
                "sampling.max_new_tokens; if the prompts are long, set model.max_prompt_tokens and model.tokenizer"
            )
            return [Answer(None, self.count_failure(Failure(CONTEXT, message))) for _ in answers]
        return answers

    async def _write(self, request: GenerationRequest, tokens: list[int] | Failure | None, params: SamplingParams) -> Answer:
        if isinstance(tokens, Failure):
            return Answer(None, self.count_failure(tokens))
        context = self._connection.replicas.all[0].max_tokens
        if context is not None and params.max_new_tokens >= context:
            message = (
                f"max_new_tokens {params.max_new_tokens} leaves no room for a prompt in the server's context of {context} tokens"
            )
            return Answer(None, self.count_failure(Failure(CONTEXT, message)))
        limit = self.model.max_prompt_tokens
        if limit is not None and tokens is not None and len(tokens) > limit:
            return Answer(None, prompt_tokens=len(tokens), too_long=True)
        path, body = self._generation(request, tokens, params)
        read = _read_chat if path.endswith("chat/completions") else _read_completion
        try:
            answer = await self._connection.call(path, body, read, affinity=request.affinity, deadline_s=params.timeout_s)
        except TooLong:
            return Answer(None, too_long=True, refused=True)
        if isinstance(answer, Failure):
            return Answer(None, answer)
        self._count(answer.prompt_tokens, answer.new_tokens)
        if limit is not None and tokens is None and answer.prompt_tokens > limit:  # only the server could count
            return Answer(None, prompt_tokens=answer.prompt_tokens, too_long=True)
        return answer

    def _generation(
        self, request: GenerationRequest, tokens: list[int] | None, params: SamplingParams
    ) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": stable_seed(params.seed, request.key, bits=32) >> 1,  # some servers accept 31 bits only
        }
        if params.stop:
            body["stop"] = list(params.stop)
            if params.keep_stop:
                body |= {"no_stop_trim": True} if self.model.dialect == "sglang" else {"include_stop_str_in_output": True}
        if self.model.dialect != "openai":
            body |= NO_TRUNCATION
        if tokens is not None:
            return "/v1/completions", {"prompt": tokens, **body}
        if request.text is None:
            return "/v1/chat/completions", {"messages": request.messages, **body}
        if self.model.dialect == "vllm":
            body["add_special_tokens"] = False  # the text contains them
        return "/v1/completions", {"prompt": request.text, **body}

    def _prompts(self, requests: Sequence[GenerationRequest]) -> list[list[int] | Failure]:
        """Each request's prompt as tokens."""
        assert self._template is not None
        prompts: list[list[int] | Failure] = []
        for request in requests:
            try:
                if request.text is None:
                    prompts.append(self._template.prompt_tokens(request.messages))
                else:
                    prompts.append(self._template.control_tokens.text_tokens(request.marked or request.text))
            except Exception as error:  # templates may raise anything
                prompts.append(_unrendered(error))
        return prompts

    # Scores -----------------------------------------------------------------------------------------------------------

    async def score(self, conversations: Sequence[list[Message]]) -> list[ScalarScore]:
        if not self.scalar:
            raise PlauditError("this client was made for a generative judge: pass scalar=True")
        tokens: Sequence[list[int] | Failure | None] = [None] * len(conversations)
        if self._template is not None:
            tokens = await asyncio.to_thread(self._conversation_tokens, conversations)
        pairs = list(zip(conversations, tokens, strict=True))
        return await self._each(pairs, lambda pair: self._score(*pair))

    async def _score(self, messages: list[Message], tokens: list[int] | Failure | None) -> ScalarScore:
        if isinstance(tokens, Failure):
            return ScalarScore(None, self.count_failure(tokens))
        replicas = self._connection.replicas.all
        limit = self.model.max_prompt_tokens or replicas[0].max_tokens
        if limit is not None and tokens is not None and len(tokens) > limit:
            return ScalarScore(None, prompt_tokens=len(tokens), too_long=True)
        body, read = self._scoring(messages, tokens)
        # Responses to the same prompt share its prefix.
        affinity = str(stable_seed(repr(messages[:-1]))) if len(replicas) > 1 else ""
        try:
            result = await self._connection.call("/classify", body, read, affinity=affinity)
        except TooLong:
            return ScalarScore(None, too_long=True, refused=True)
        if isinstance(result, Failure):
            return ScalarScore(None, result)
        value, prompt_tokens = result
        self._count(prompt_tokens)
        if limit is not None and tokens is None and prompt_tokens > limit:
            return ScalarScore(None, prompt_tokens=prompt_tokens, too_long=True)
        return ScalarScore(value, prompt_tokens=prompt_tokens or len(tokens or ()))

    def _scoring(
        self, messages: list[Message], tokens: list[int] | None
    ) -> tuple[dict[str, Any], Callable[[Any], tuple[float, int]]]:
        if self.model.dialect == "sglang":
            return {"input_ids": tokens}, _read_sglang
        # Otherwise vLLM applies a sigmoid. (Before 0.11.1 the option was `activation`; unknown options are ignored.)
        raw = {"use_activation": False, "activation": False}
        return raw | ({"messages": messages} if tokens is None else {"input": tokens}), _read_classes

    def _conversation_tokens(self, conversations: Sequence[list[Message]]) -> list[list[int] | Failure]:
        """Each conversation as tokens."""
        assert self._template is not None
        prompts: list[list[int] | Failure] = []
        for messages in conversations:
            try:
                prompts.append(self._template.conversation_tokens(messages))
            except Exception as error:
                prompts.append(_unrendered(error))
        return prompts

    # Both -------------------------------------------------------------------------------------------------------------

    async def _each(self, items: Sequence[Item], call: Callable[[Item], Awaitable[Result]]) -> list[Result]:
        """The results of `call`, in order. No more tasks than concurrent calls."""
        results: list[Any] = [None] * len(items)
        left = iter(enumerate(items))

        async def work() -> None:
            for i, item in left:
                results[i] = await call(item)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(len(items), self._connection.limits.max_concurrent_calls)):
                tasks.create_task(work())
        return results

    def _count(self, prompt_tokens: int, new_tokens: int = 0) -> None:
        self.usage.prompt_tokens += prompt_tokens
        self.usage.new_tokens += new_tokens
        self._connection.rate_limiter.spend(prompt_tokens + new_tokens)

    def count_failure(self, failure: Failure) -> Failure:
        """Count a request that failed before it was sent, as one failed attempt."""
        usage, cause = self.usage, failure.cause
        usage.calls += 1
        usage.faults[cause] = usage.faults.get(cause, 0) + 1
        usage.failures[cause] = usage.failures.get(cause, 0) + 1
        return failure


# Responses -----------------------------------------------------------------------------------------------------------


def _read_chat(answer: Any) -> Answer:
    choice = answer["choices"][0]
    message = choice["message"]
    text = message["content"]
    if text is None and (message.get("reasoning_content") or message.get("reasoning")):
        text = ""  # truncated within its reasoning
    return _answer(answer, choice, text)


def _read_completion(answer: Any) -> Answer:
    choice = answer["choices"][0]
    return _answer(answer, choice, choice["text"])


def _answer(answer: Any, choice: Any, text: Any) -> Answer:
    if not isinstance(text, str):
        raise Garbage("the response contains no text")
    usage = answer.get("usage") or {}
    return Answer(
        redact_all(text),  # it may be quoted in a prompt for another server
        prompt_tokens=read_token_count(usage, "prompt_tokens"),
        new_tokens=read_token_count(usage, "completion_tokens"),
        truncated=choice.get("finish_reason") == "length",
    )


def _read_classes(answer: Any) -> tuple[float, int]:
    """vLLM's /classify: the score and the number of prompt tokens."""
    return _number(answer["data"][0]["probs"]), read_token_count(answer.get("usage") or {}, "prompt_tokens")


def _read_sglang(answer: Any) -> tuple[float, int]:
    """SGLang's /classify: an object, or a list of one."""
    one = answer[0] if isinstance(answer, list) else answer
    return _number(one["embedding"]), read_token_count(one.get("meta_info") or {}, "prompt_tokens")


def _number(values: Any) -> float:
    if len(values) != 1:
        raise Garbage(f"{len(values)} numbers instead of one (not a reward model with a single label?)")
    value = values[0]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_SCORE:
        raise Garbage(f"not a finite number of at most {MAX_SCORE:g}")
    return float(value)


def read_token_count(usage: Any, name: str) -> int:
    """A number of tokens: rate limits and costs depend on it."""
    count = usage.get(name) or 0
    if type(count) is not int or not 0 <= count <= MAX_TOKENS:
        raise Garbage(f"{name} is not a number of tokens")
    return count


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", …" if len(names) > 20 else "")


def _unrendered(error: Exception) -> Failure:
    return Failure("render", f"the chat template cannot render this conversation: {type(error).__name__}: {error}"[:500])
