"""`plaudit eval`: the verbs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plaudit.command_help import examples
from plaudit.errors import PlauditError
from plaudit.heavy_imports import heavy_imports
from plaudit.options import (
    ChatTemplateName,
    Device,
    Dtype,
    MaxNewTokens,
    MaxPromptTokens,
    Quiet,
    ServedName,
    ServerCredential,
    ServerDialect,
    ServerUrl,
    StopStrings,
    Temperature,
    Tokenizer,
    TopP,
)

if TYPE_CHECKING:
    from plaudit.evaluation.results import Evaluation
    from plaudit.statistics.figures import Resampling

evaluate = typer.Typer(
    help="How good is a reward model, a judge, a verifier, a policy? Figures with intervals, side by side.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

RewardRecipes = Annotated[
    list[str],
    typer.Option(
        "--rewards",
        metavar="R.yaml",
        help="A recipe whose rewards are evaluated, as R.yaml or NAME=R.yaml. Several: R1.yaml R2.yaml, or --rewards again.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder to write or resume. Default: runs/eval/ and the name of the first file.", show_default=False),
]
Seed = Annotated[int, typer.Option(min=0, help="Of the resamples behind intervals.")]
Resamples = Annotated[int, typer.Option(min=100, help="Resamples behind intervals.")]
Confidence = Annotated[float, typer.Option(min=0.5, max=0.999, help="Of intervals.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the tables as markdown, for a model card.")]
AllowFailures = Annotated[bool, typer.Option("--allow-failures", help="Exit with status 0 although some items have no value.")]


MaxItems = Annotated[int | None, typer.Option(min=1, help="Only the first n rows of each file.")]


@evaluate.command(epilog=examples("eval rewards"))
def rewards(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE…", help="Preference data: files (.jsonl, .parquet, .json), or data sets on the hub.", show_default=False
        ),
    ],
    recipes: RewardRecipes,
    out: Out = None,
    max_items: MaxItems = None,
    markdown: Markdown = False,
    allow_failures: AllowFailures = False,
    seed: Seed = 0,
    resamples: Resamples = 2000,
    confidence: Confidence = 0.95,
    tokenizer: Tokenizer = None,
    quiet: Quiet = False,
) -> None:
    """How often do rewards prefer the right response? On preference benchmarks, or pairs of your own.

    Known by their columns: `prompt`, `chosen`, `rejected`; RewardBench 1 and 2, RM-Bench, JudgeBench, RMB, LLMBar. Judges that
    compare see both orders. Run the same command again to resume.
    """
    from plaudit.data.conversations import resolve_sources

    names, recipes = split_recipes("rewards", files, recipes)
    sources = resolve_sources(names, None, "FILE")
    folder = _folder(out, names)

    from plaudit.evaluation.pictures import draw_rewards
    from plaudit.evaluation.rewards import RewardsJob, evaluate_rewards
    from plaudit.evaluation.scored import load_evaluated

    job = RewardsJob(load_evaluated(recipes), sources, folder, _resampling(seed, resamples, confidence), max_items, tokenizer)
    evaluation = evaluate_rewards(job)
    picture = folder / "eval.png"
    draw_rewards(evaluation.figures, evaluation.curves["length"], picture)
    _finish(evaluation, folder, [picture], markdown, allow_failures)


@evaluate.command(epilog=examples("eval ranking"))
def ranking(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE…", help="Scored groups: files (.jsonl, .parquet, .json), or data sets on the hub.", show_default=False
        ),
    ],
    recipes: RewardRecipes,
    out: Out = None,
    runs: Annotated[
        int, typer.Option(min=1, help="Runs that are averaged, each with another seed, of rewards whose model samples.")
    ] = 1,
    candidates: Annotated[
        str | None, typer.Option(help="Column of the candidates. Default: mt_texts, responses or completions.", show_default=False)
    ] = None,
    scores: Annotated[
        str | None, typer.Option(help="Column of their scores. Default: scores, labels or label.", show_default=False)
    ] = None,
    systems: Annotated[
        str | None, typer.Option(help="Column of their systems. Default: systems, if it exists.", show_default=False)
    ] = None,
    max_items: MaxItems = None,
    markdown: Markdown = False,
    allow_failures: AllowFailures = False,
    seed: Seed = 0,
    resamples: Resamples = 2000,
    confidence: Confidence = 0.95,
    tokenizer: Tokenizer = None,
    quiet: Quiet = False,
) -> None:
    """How well do rewards rank candidates, such as translations? Judges of groups, pairs and single responses, reward models and
    rules on the same groups.

    Rows have `src_text`, `src_lang`, `trg_lang`, `mt_texts` and `scores`; or `prompt`, `responses` and `scores`. Run the same
    command again to resume.
    """
    from plaudit.data.conversations import resolve_sources

    names, recipes = split_recipes("ranking", files, recipes)
    sources = resolve_sources(names, None, "FILE")
    folder = _folder(out, names)

    from plaudit.evaluation.groups import GroupColumns
    from plaudit.evaluation.pictures import draw_ranking
    from plaudit.evaluation.ranking import RankingJob, evaluate_ranking
    from plaudit.evaluation.scored import load_evaluated

    job = RankingJob(
        load_evaluated(recipes), sources, folder, _resampling(seed, resamples, confidence),
        GroupColumns(candidates, scores, systems), runs, max_items, tokenizer,
    )  # fmt: skip
    evaluation = evaluate_ranking(job)
    picture = folder / "eval.png"
    draw_ranking(evaluation.figures, picture)
    _finish(evaluation, folder, [picture], markdown, allow_failures)


@evaluate.command(epilog=examples("eval verifier"))
def verifier(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE…", help="Labelled answers: files (.jsonl, .parquet, .json), or data sets on the hub.", show_default=False
        ),
    ],
    recipes: RewardRecipes,
    out: Out = None,
    threshold: Annotated[float, typer.Option(help="An answer is accepted if its reward is at least this.")] = 0.5,
    label: Annotated[
        str | None, typer.Option(help="Column that says whether an answer is right. Default: label.", show_default=False)
    ] = None,
    max_items: MaxItems = None,
    markdown: Markdown = False,
    allow_failures: AllowFailures = False,
    seed: Seed = 0,
    resamples: Resamples = 2000,
    confidence: Confidence = 0.95,
    tokenizer: Tokenizer = None,
    quiet: Quiet = False,
) -> None:
    """How often do rewards accept wrong answers, and reject right ones? A rule, a judge, and the two together, side by side.

    Rows have a question (`prompt`), an answer (`response`), a reference (`ground_truth`) and `label`: true or false. Run the same
    command again to resume.
    """
    from plaudit.data.conversations import resolve_sources

    names, recipes = split_recipes("verifier", files, recipes)
    sources = resolve_sources(names, None, "FILE")
    folder = _folder(out, names)

    from plaudit.evaluation.compared import ALL
    from plaudit.evaluation.pictures import draw_verifier
    from plaudit.evaluation.scored import load_evaluated
    from plaudit.evaluation.verifier import VerifierJob, evaluate_verifier

    job = VerifierJob(
        load_evaluated(recipes), sources, folder, _resampling(seed, resamples, confidence), threshold, label, max_items, tokenizer
    )
    evaluation = evaluate_verifier(job)
    picture = folder / "eval.png"
    draw_verifier({name: own.get(ALL, {}) for name, own in evaluation.figures.items()}, picture)
    _finish(evaluation, folder, [picture], markdown, allow_failures)


@evaluate.command(epilog=examples("eval policy"))
def policy(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL… PROMPTS…",
            help="Models: folders or names on the hub, as MODEL or NAME=MODEL. Prompts: files (.jsonl, .parquet, .json); if no "
            "argument is one, the last is a data set on the hub.",
            show_default=False,
        ),
    ],
    recipes: RewardRecipes,
    out: Out = None,
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Responses per prompt.")] = 16,
    k: Annotated[str | None, typer.Option("--k", help="Of pass@k and the like: 1,4,16. Default: 1, 2, 4, …, n.")] = None,
    gold: Annotated[
        str | None,
        typer.Option(
            help="Name of the reward that counts; the others choose among responses. Default: the first.", show_default=False
        ),
    ] = None,
    threshold: Annotated[float, typer.Option(help="A response passes if the gold reward is at least this.")] = 0.5,
    max_new_tokens: MaxNewTokens = 1024,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    stop: StopStrings = None,
    max_prompt_tokens: MaxPromptTokens = 4096,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Use the first n prompts only.")] = None,
    chat_template: ChatTemplateName = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    url: ServerUrl = None,
    served_name: ServedName = None,
    credential: ServerCredential = None,
    dialect: ServerDialect = "vllm",
    markdown: Markdown = False,
    allow_failures: AllowFailures = False,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling, and of the resamples behind intervals.")] = 0,
    resamples: Resamples = 2000,
    confidence: Confidence = 0.95,
    quiet: Quiet = False,
) -> None:
    """How good are a model's responses? Mean reward, pass@k, majority vote, and best-of-n by one reward measured by another.

    Responses are sampled as by `plaudit sample`, kept in OUT/samples, and reused. Several models are compared on the same prompts.
    Run the same command again to resume.
    """
    from plaudit.data.conversations import resolve_sources
    from plaudit.loops.cli import build_job, read_server, require_sampled_model
    from plaudit.recipe import ModelSettings

    names, recipes = split_recipes("policy", arguments, recipes, "MODEL PROMPTS")
    models, prompts = split_models(names)
    if temperature == 0 and n > 1:
        raise typer.BadParameter("greedy responses are all the same: choose a temperature, or -n 1.", param_hint="--temperature")
    server = read_server("eval policy", url, served_name, credential, dialect)
    if server is not None and len(models) > 1:
        raise typer.BadParameter("a server has one model: evaluate one at a time.", param_hint="--url")

    from plaudit.evaluation.scored import file_name, load_evaluated, name_paths

    named = name_paths(models, model_name, "MODEL")
    settings = {name: ModelSettings(path=str(path), chat_template=chat_template, dtype=dtype) for name, path in named.items()}
    for one in settings.values():
        require_sampled_model(one, "eval policy", served=server is not None)
    sources = resolve_sources(prompts, None, "PROMPTS")
    rewards = load_evaluated(recipes)

    with heavy_imports():
        from plaudit.evaluation.pictures import draw_policy
        from plaudit.evaluation.policy import EvaluatedModel, PolicyJob, choose_gold, choose_ks, evaluate_policy
        from plaudit.rollout.engine import Sampling

    ks, gold = choose_ks(k, n), choose_gold(rewards, gold)
    folder = _folder(out, prompts)
    sampling = Sampling(max_new_tokens, temperature, top_p, seed=seed)
    sampled = [
        EvaluatedModel(
            name,
            build_job(
                one, sources, folder / "samples" / f"{file_name(name)}.jsonl", n, sampling, stop,
                max_prompt_tokens=max_prompt_tokens, too_long="filter", max_prompts=max_prompts, device=device, server=server,
            ),
        )
        for name, one in settings.items()
    ]  # fmt: skip
    job = PolicyJob(sampled, rewards, sources, folder, _resampling(seed, resamples, confidence), gold, ks, threshold)
    evaluation = evaluate_policy(job)
    picture = folder / "eval.png"
    draw_policy(evaluation.figures, evaluation.curves["best of n"], gold, ks, picture)
    _finish(evaluation, folder, [picture], markdown, allow_failures)


# What the verbs share ------------------------------------------------------------------------------------------------


def split_models(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Models and prompts: files with the suffix of data are prompts; without one, the last argument is."""
    prompts = [one for one in arguments if one.endswith((".jsonl", ".parquet", ".json")) and "=" not in one] or arguments[-1:]
    models = [one for one in arguments if one not in prompts]
    if not models:
        raise PlauditError(f"eval policy needs a model and prompts: plaudit eval policy MODEL {prompts[0]} --rewards R.yaml")
    return models, prompts


def model_name(path: Path) -> str:
    """The name of its folder, or of the run whose model it is."""
    return path.parent.name if path.name == "model" and path.parent.name else path.name


def split_recipes(verb: str, arguments: list[str], recipes: list[str], usage: str = "FILE") -> tuple[list[str], list[str]]:
    """`--rewards R1.yaml R2.yaml`: recipes among the arguments belong to --rewards."""
    more = [one for one in arguments if one.endswith((".yaml", ".yml"))]
    names = [one for one in arguments if one not in more]
    if not names:
        raise PlauditError(f"eval needs data: plaudit eval {verb} {usage} --rewards R.yaml")
    return names, [*recipes, *more]


def _folder(out: Path | None, names: list[str]) -> Path:
    from plaudit.evaluation.results import create_folder

    folder = out or Path("runs/eval") / Path(names[0]).stem
    create_folder(folder)
    return folder


def _resampling(seed: int, resamples: int, confidence: float) -> "Resampling":
    from plaudit.statistics.figures import Resampling

    return Resampling(seed, resamples, confidence)


def _finish(evaluation: "Evaluation", folder: Path, pictures: list[Path], markdown: bool, allow_failures: bool) -> None:
    """Write and print; the exit status is 1 while something has no value."""
    from plaudit.evaluation.report import print_evaluation
    from plaudit.evaluation.results import markdown as as_markdown
    from plaudit.evaluation.results import write_evaluation
    from plaudit.report.progress import print_line

    write_evaluation(evaluation, folder)
    if markdown:
        print(as_markdown(evaluation), end="")
    else:
        print_evaluation(evaluation, folder, pictures)
    failed = {name: details["failed"] for name, details in evaluation.details.items() if details.get("failed")}
    if failed and not allow_failures:
        counts = ", ".join(f"{count:,} of {name}" for name, count in failed.items())
        print_line(
            f"some items have no value ({counts}); they are in no figure. Run the same command to score them again, or pass "
            "--allow-failures to accept this",
            "yellow",
        )
        raise typer.Exit(1)
