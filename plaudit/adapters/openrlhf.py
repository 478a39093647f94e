"""plaudit's rewards in OpenRLHF: a server for its remote reward URL, or a local Python file.

    python -m plaudit.adapters.openrlhf rewards.yaml --port 5000
    … train_ppo_ray --reward.remote_url http://127.0.0.1:5000/get_reward --data.label_key label     (before 0.11: --remote_rm_url)

or, without a server, `--reward.remote_url my_rewards.py` with

    from plaudit.adapters.openrlhf import reward_function
    reward_func = reward_function("rewards.yaml")

OpenRLHF posts the lists `query` (prompt and response as one text), `prompts` and `labels`, and reads `rewards`, `scores` and
`extra_logs`. A label is the ground truth, or an object with `ground_truth` (verl's `reward_model`), `data_source` and `extra_info`.
OpenRLHF requests one sample at a time, so rewards that compare the samples of a prompt are refused.

A failed reward has no value, and OpenRLHF cannot skip a sample. So the response is status 500 with the cause: OpenRLHF retries four
times, a second apart, and then stops for lack of a reward. To continue instead, set a value in the recipe (`on_failure: -1.0`).
"""

import argparse
import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from plaudit.adapters.shared_scorer import Result, SharedScorer, refuse_groups, shared_scorer, value_of
from plaudit.errors import PlauditError

END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
    "<eos>",
    "</s>",
)
"""Removed from the end of a query, so that rewards do not see them."""

MIN_PROMPT_CHARS = 16
"""Characters of a left-truncated prompt needed to locate it in its query."""


class BadRequest(ValueError):
    """A request that OpenRLHF would not send."""


def reward_function(rewards: str | os.PathLike[str], end_tokens: Sequence[str] = END_TOKENS) -> Callable[..., dict[str, Any]]:
    """OpenRLHF's `reward_func(queries, prompts, labels)`."""
    path = os.path.abspath(rewards)

    def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any], **_: Any) -> dict[str, Any]:
        import torch

        scorer = _scorer(path)
        results = scorer.submit(_rows(queries, prompts, labels, end_tokens)).result()
        response = _response_body(results, scorer)
        logs = {name: torch.tensor(values) for name, values in response["extra_logs"].items()}
        values = torch.tensor(response["rewards"])
        return {"rewards": values, "scores": values, "extra_logs": logs}

    return reward_func


def application(rewards: str | os.PathLike[str], end_tokens: Sequence[str] = END_TOKENS) -> web.Application:
    """The server. Rewards start with it, so that mistakes in the recipe are reported before training."""
    scorer = _scorer(rewards)
    scorer.submit([]).result()

    async def get_reward(request: web.Request) -> web.Response:
        try:
            body = await request.json()
            rows = _rows(_column(body, "query"), _column(body, "prompts"), _column(body, "labels"), end_tokens)
        except (json.JSONDecodeError, UnicodeDecodeError, BadRequest) as error:
            return web.json_response({"error": f"{error}"}, status=400)
        try:
            results = await asyncio.wrap_future(scorer.submit(rows))
            return web.json_response(_response_body(results, scorer))
        except PlauditError as error:
            logging.getLogger(__name__).error("%s", error)
            return web.json_response({"error": f"{error}"}, status=500)

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"rewards": [reward.label for reward in scorer.scorer.rewards]})

    app = web.Application(client_max_size=256 * 2**20)
    app.add_routes([web.post("/get_reward", get_reward), web.post("/", get_reward), web.get("/health", health)])
    return app


def _scorer(rewards: str | os.PathLike[str]) -> SharedScorer:
    scorer = shared_scorer(rewards)
    refuse_groups(scorer.scorer, "OpenRLHF")
    return scorer


def _column(body: Any, name: str) -> list[Any]:
    values = body.get(name) if isinstance(body, dict) else None
    if not isinstance(values, list):
        raise BadRequest(f"{name!r} should be a list, one entry per sample")
    return values


def _rows(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any], end_tokens: Sequence[str]) -> list[dict[str, Any]]:
    if not len(queries) == len(prompts) == len(labels):
        raise BadRequest(f"{len(queries)} queries, {len(prompts)} prompts and {len(labels)} labels: the numbers must be equal")
    return [
        {"prompt": prompt, "response": _response(query, prompt, end_tokens), **_label_fields(label)}
        for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]


def _response(query: str, prompt: str, end_tokens: Sequence[str]) -> str:
    """The query's text after the prompt, without end tokens."""
    if not isinstance(query, str) or not isinstance(prompt, str):
        raise BadRequest("queries and prompts must be strings")
    response = query[_end_of_prompt(query, prompt) :]
    while True:
        stripped = response.rstrip()
        end = next((token for token in end_tokens if stripped.endswith(token)), None)
        if end is None:
            return response
        response = stripped.removesuffix(end)


def _end_of_prompt(query: str, prompt: str) -> int:
    if (start := query.find(prompt)) >= 0:  # a special token may precede it
        return start + len(prompt)
    # OpenRLHF truncates long prompts on the left: the query then begins with the prompt's longest matching suffix.
    head, cut = query[:MIN_PROMPT_CHARS], -1
    while len(head) == MIN_PROMPT_CHARS and (cut := prompt.find(head, cut + 1)) >= 0:
        if query.startswith(prompt[cut:]):
            return len(prompt) - cut
    raise BadRequest(f"a query does not begin with its prompt: {query[:100]!r} … and {prompt[:100]!r} …")


def _label_fields(label: Any) -> dict[str, Any]:
    if not isinstance(label, Mapping) or "ground_truth" not in label:
        return {"ground_truth": label}
    return {
        "ground_truth": label["ground_truth"],
        "data_source": label.get("data_source") or "",
        "extra_info": label.get("extra_info") or {},
    }


def _response_body(results: Sequence[Result], scorer: SharedScorer) -> dict[str, Any]:
    """Always the same logs, because OpenRLHF stacks them over responses: rewards that apply to every row, NaN if one failed."""
    values = [value_of(result, "OpenRLHF") for result in results]
    unconditional = [reward.label for reward in scorer.scorer.rewards if not reward.when and reward.gate is None]
    logs = {label: [result["parts"].get(label, float("nan")) for result in results] for label in unconditional}
    return {"rewards": values, "scores": values, "extra_logs": {**logs, "malformed": [float(r["malformed"]) for r in results]}}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m plaudit.adapters.openrlhf", description="Serve a recipe's rewards to OpenRLHF."
    )
    parser.add_argument("rewards", help="a recipe with a list of rewards, or an RL recipe")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 to accept other machines; there is no authentication")
    parser.add_argument("--port", type=int, default=5000, help="0 for any free port")
    parser.add_argument("--end-token", action="append", default=[], help="text of a token that ends the policy's responses")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        app = application(args.rewards, (*END_TOKENS, *args.end_token))
        web.run_app(app, host=args.host, port=args.port, access_log=None)
    except PlauditError as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
