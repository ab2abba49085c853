"""Training of runs that are chosen adaptively and kept in memory, in threads.

A comparison of models chooses its next runs from the results so far, and scores them
itself; the training is that of a sweep (`branching`).
"""

import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxkv.progress import Progress
from scaling.corpora import Corpus
from scaling.sweeps import branching
from scaling.sweeps.branching import FinishedRun, Scorer
from scaling.training import TrainConfig


class Workers:
    """Trains chains of runs, several at a time.

    Args:
      corpus: corpus of all runs, with its stream on the device.
      score: scores a run.
      progress: receives the progress of all runs, and may stop them.
      num_steps: steps of all runs, with shared steps counted once.
      num_threads: number of concurrent chains: one may train while another compiles.
        The results do not depend on it.
    """

    def __init__(
        self,
        corpus: Corpus,
        score: Scorer,
        progress: Progress,
        *,
        num_steps: int,
        num_threads: int = 1,
    ):
        self.corpus = corpus
        self._score = score
        self._progress = progress
        self._lock = threading.Lock()
        self._done = 0
        self._num_threads = num_threads
        self._update = progress.bar("training", num_steps, "steps")

    def train(
        self, runs: Sequence[TrainConfig], shown: Callable[[FinishedRun], str]
    ) -> Iterator[FinishedRun]:
        """Trains runs of one model, rate and seed, bit for bit as if separate.

        Args:
          runs: runs of rising length; a longer one is the trunk of the shorter ones.
          shown: formats a completed run for display.

        Yields:
          The runs; one that diverged has no score.

        Raises:
          branching.StopRequested: `progress` was stopped.
          RuntimeError: a run failed, for example out of memory.
        """

        def advance(num_steps: int) -> bool:
            with self._lock:
                self._done += num_steps
                self._update(self._done)
            return not self._progress.stopped

        horizons = [[run] for run in runs]
        for finished in branching.train_branches(
            horizons,
            self.corpus,
            is_vmapped=False,
            score=self._score,
            advance=advance,
        ):
            if finished.status == "failed":
                raise RuntimeError(finished.error)
            with self._lock:
                self._progress.show(shown(finished))
            yield finished

    def map[J, R](self, work: Callable[[J], R], jobs: Iterable[J]) -> Iterator[R]:
        """Runs jobs that train, in threads.

        Yields:
          Results in the order of the jobs, without stopped ones.
        """

        def one(job: J) -> tuple[R] | None:
            if self._progress.stopped:
                return None
            try:
                return (work(job),)
            except branching.StopRequested:
                return None

        with concurrent.futures.ThreadPoolExecutor(self._num_threads) as pool:
            for outcome in pool.map(one, jobs):
                if outcome is not None:
                    yield outcome[0]
