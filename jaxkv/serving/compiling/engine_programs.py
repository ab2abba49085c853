"""The compiled programs of one engine, each compiled before its first use."""

import contextlib
import functools
import time
from collections.abc import Generator, Mapping

import jax
from jaxtyping import PyTree

from jaxkv.arrays import ArrayOrShape
from jaxkv.clock import from_seconds
from jaxkv.engine import EngineConfig, EngineRules, EngineState, RequestKinds, StepInfo
from jaxkv.serving.compiling import compilation_cache, program_store
from jaxkv.serving.compiling.program_store import CompiledProgram
from jaxkv.serving.compiling.programs import Programs


class EnginePrograms:
    """Programs for the shapes of one engine; copies share those compiled so far."""

    def __init__(
        self, programs: Programs, config: EngineConfig, static: Mapping[str, object]
    ):
        """Compiles nothing."""
        self.jitted = programs
        """The jitted functions."""
        self.compile_s = 0.0
        """Seconds of compilation so far, including tracing."""
        self._config = config
        self.static = static
        """Static arguments of the steps, besides the rules; may be replaced."""
        self._steps: dict[tuple[object, ...], CompiledProgram] = {}
        self._others: dict[str, CompiledProgram] = {}

    def copy(self) -> "EnginePrograms":
        """Copies the programs compiled so far, for another engine of equal shapes."""
        other = EnginePrograms(self.jitted, self._config, self.static)
        other.compile_s = self.compile_s
        other._steps = {**self._steps}
        other._others = {**self._others}
        return other

    def compile(
        self, name: str, state: EngineState, *args: object, **options: object
    ) -> None:
        """Compiles the function `name` of `Programs` for these further arguments."""
        if name in self._others:
            return
        takes_config = name in ("submit", "forget_kv")
        static = {"config": self._config} if takes_config else {}
        with self._counting():
            self._others[name] = program_store.compile_program(
                getattr(self.jitted, name), static, state, *args, **options
            )

    def __getitem__(self, name: str) -> CompiledProgram:
        """Returns a program that was compiled by `compile`."""
        return self._others[name]

    def has_steps(self, rules: EngineRules, kinds: RequestKinds) -> bool:
        """True if the steps are compiled for these rules and kinds of requests."""
        return self._step_key(rules, kinds, True) in self._steps

    def compile_steps(
        self,
        params: PyTree[ArrayOrShape],
        state: EngineState,
        rules: EngineRules,
        kinds: RequestKinds,
    ) -> None:
        """Compiles the steps, without drafts as well if a drafter can be disabled."""
        if self.has_steps(rules, kinds):
            return
        with self._counting():
            modes = (True,)
            if (speculation := rules.speculation) is not None:
                is_disabled = functools.partial(
                    speculation.drafter.is_disabled, config=self._config
                )
                if jax.eval_shape(is_disabled, state.memory, state) is not None:
                    modes = False, True
            for may_draft in modes:
                static = {
                    **self.static,
                    "logits_fn": rules.logits_fn,
                    "speculation": speculation,
                    "may_draft": may_draft,
                    "kinds": kinds,
                }
                key = self._step_key(rules, kinds, may_draft)
                self._steps[key] = program_store.compile_program(
                    self.jitted.run_steps,
                    static,
                    params,
                    state,
                    from_seconds(0.0),
                    policy=rules.policy,
                    eviction=rules.eviction,
                    grammars=rules.grammars,
                )

    def run_steps(
        self,
        params: PyTree[ArrayOrShape],
        state: EngineState,
        now: float,
        rules: EngineRules,
        kinds: RequestKinds,
        may_draft: bool,
    ) -> tuple[EngineState, StepInfo]:
        """Runs the compiled steps of a call at time `now` in s; consumes the state."""
        program = self._steps[self._step_key(rules, kinds, may_draft)]
        return program(
            params,
            state,
            from_seconds(now),
            policy=rules.policy,
            eviction=rules.eviction,
            grammars=rules.grammars,
        )

    def _step_key(
        self, rules: EngineRules, kinds: RequestKinds, may_draft: bool
    ) -> tuple[object, ...]:
        """Returns all that a program of steps depends on, besides the engine."""
        leaves, tree = jax.tree.flatten((rules.policy, rules.eviction))
        shapes = tuple(map(jax.typeof, leaves))
        static = *self.static.values(), rules.logits_fn, rules.speculation
        return tree, shapes, *static, kinds, may_draft

    @contextlib.contextmanager
    def _counting(self) -> Generator[None]:
        """Adds the seconds of the block to `compile_s`; a notice is printed if slow."""
        begun = time.perf_counter()
        with compilation_cache.notify_if_slow():
            yield
        self.compile_s += time.perf_counter() - begun
