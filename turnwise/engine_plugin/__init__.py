"""The plug-in that vLLM loads in each of its processes: what it registers and mends there.

The entry point is `vllm.general_plugins`. The package registers a backend for vLLM's weight transfer: `weight_engine`
is the part inside vLLM, `receiver` receives and checks a version, `channel` carries its bytes over a process group of
torch's, and the trainer sends with it. `features` has the rest, a module each. `upstream` says which releases of vLLM
all of this fits.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from turnwise.engine_plugin import upstream
from turnwise.engine_plugin.features import FEATURES

BACKEND = "turnwise"
"""Name of the backend: `--weight-transfer-config '{"backend": "turnwise"}'`."""
PLUGIN_GROUP = "vllm.general_plugins"

REASON_FILE = "TURNWISE_ENGINE_REASON"
"""Variable with the name of the file into which a process of the engine that dies writes why."""


@functools.cache
def register() -> None:
    """Register the backend, and let the features of the plug-in change vLLM.

    vLLM calls this in each of its processes, sometimes more than once; the first call counts.

    Raises:
        RuntimeError: vLLM is outside of the range that the plug-in fits; the engine does not start.
    """
    from vllm.version import __version__

    if (problem := upstream.refusal(__version__)) is not None:
        raise RuntimeError(problem)

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.engine.exceptions import EngineDeadError
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    load_beside_adapters(LoRAModelRunnerMixin)
    tell_why_it_died(EngineCoreProc, EngineDeadError)
    for name in FEATURES:
        importlib.import_module(f"{__name__}.features.{name}").register()
    WeightTransferEngineFactory.register_engine(BACKEND, "turnwise.engine_plugin.weight_engine", "TurnwiseWeights")


def load_beside_adapters(runner: type[Any]) -> None:
    """Let an engine that accepts adapters load whole weights of every model.

    An adapted layer holds its weights one level deeper. The loaders of some models, such as Granite 4's and GPT-OSS's,
    look tensors up by the names that files have, and would end at the first one. Names of experts stay as they are,
    because loaders that adapt experts expect the deeper ones.
    """
    load = runner.load_lora_model

    def plain(named: Any, *arguments: Any, **options: Any) -> Any:
        for name, parameter in named(*arguments, **options):
            yield name if ".experts." in name else name.replace(".base_layer.", "."), parameter

    @functools.wraps(load)
    def load_and_rename(self: Any, *arguments: Any, **options: Any) -> Any:
        model = load(self, *arguments, **options)
        for module in model.modules():
            if "load_weights" in vars(type(module)):
                module.named_parameters = functools.partial(plain, module.named_parameters)
        return model

    runner.load_lora_model = load_and_rename


def tell_why_it_died(core: type[Any], dead: type[Exception]) -> None:
    """Let the error of an engine that died name the exception that ended it.

    The first process of vLLM makes the file, and the others inherit its name. A `core` tells it that it dies, and it
    answers calls with `dead` then. From 0.33 on it answers with a text of its own, which gets the reason too.
    """
    if REASON_FILE not in os.environ:
        handle, os.environ[REASON_FILE] = tempfile.mkstemp(prefix="turnwise-engine-")
        os.close(handle)
    file = Path(os.environ[REASON_FILE])
    send, begin = core._send_engine_dead, dead.__init__  # noqa: SLF001  vLLM calls it where the exception is handled

    @functools.wraps(send)
    def write_and_send(self: Any) -> None:
        error = sys.exc_info()[1]
        file.write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        send(self)

    @functools.wraps(begin)
    def begin_with_reason(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        if file.is_file() and (reason := file.read_text(encoding="utf-8")):
            self.args = (f"{self.args[0]} {reason}", *self.args[1:])
            self.CLIENT_MESSAGE = self.args[0]

    core._send_engine_dead = write_and_send  # noqa: SLF001  as above
    dead.__init__ = begin_with_reason  # type: ignore[method-assign]
