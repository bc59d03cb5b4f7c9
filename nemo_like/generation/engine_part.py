"""``EnginePart``: the workers of an engine on a further one of its nodes.

    the engine's node (VllmEngine)            each further node (EnginePart)
      vLLM's scheduler and executor
        workers 0 ... w - 1   ◀── meet ──▶      workers w ... 2w - 1
      every call ───────────────────────────▶     computed as by the engine's own workers

The engine calls all workers itself, over vLLM's message queues; a part is asked nothing. It ends when one of
its workers does. Workers that lost the engine would wait for ever, so whoever started both ends both.
"""

from __future__ import annotations

from vllm import EngineArgs
from vllm.v1.executor import Executor

from nemo_like.cluster.runtime import use_temporary_directory_of_session
from nemo_like.compat.gloo import one_gloo_device
from nemo_like.compat.shared_names import remove_names
from nemo_like.generation.engine_routes import EngineRoutes
from nemo_like.generation.engine_spec import EngineNode, EngineSpec
from nemo_like.generation.engine_thread import EngineThread, end_process
from nemo_like.generation.interface import GenerationError
from nemo_like.generation.started_vllm import complete_args


class EnginePart:
    """Holds the workers of one node, until its process is ended.

    It belongs in an actor whose process was started with ``engine_environment``.
    """

    def __init__(self, *, name: str, spec: EngineSpec, timeout_s: float, node: EngineNode) -> None:
        """Start the workers on ``node``, and wait until they have met the others and loaded their weights.

        Raises GenerationError when they do not start, and EngineOverdue after ``timeout_s``.
        """
        use_temporary_directory_of_session()
        args = complete_args(name, spec, EngineRoutes(spec.routed_experts, spec.device), node)
        self._name, self._thread = name, EngineThread(name, timeout_s)
        self._executor = self._thread.call(lambda: self._start(args))

    def _start(self, args: EngineArgs) -> Executor:
        try:
            with one_gloo_device():
                config = args.create_engine_config(headless=True)
                executor = Executor.get_class(config)(config)
        except Exception as error:
            raise GenerationError(f"{self._name!r} did not start: {error}") from error
        executor.register_failure_callback(end_process)
        remove_names()
        return executor
