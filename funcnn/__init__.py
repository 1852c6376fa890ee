"""funcnn: convolution and pooling as pure functions on any array."""

from funcnn import layers
from funcnn._arrays import ArraySpec
from funcnn._engines import EngineInfo, engines, set_num_threads
from funcnn._scratch import release_scratch
from funcnn._spec import Options
from funcnn.errors import EngineError, SpecError, StateError
from funcnn.ops import (
    avg_pool,
    avg_pool_backward,
    avg_pool_init,
    conv,
    conv_backward,
    conv_init,
    conv_transpose,
    conv_transpose_backward,
    conv_transpose_init,
    dropout,
    dropout_backward,
    dropout_init,
    max_pool,
    max_pool_backward,
    max_pool_indices,
    max_pool_init,
    out_spec,
)
from funcnn.state import (
    AvgPoolState,
    ConvState,
    ConvTransposeState,
    DropoutState,
    MaxPoolState,
    clear,
    register_pytrees,
)

__version__ = "0.1.0"

__all__ = [
    "ArraySpec",
    "AvgPoolState",
    "ConvState",
    "ConvTransposeState",
    "DropoutState",
    "EngineError",
    "EngineInfo",
    "MaxPoolState",
    "Options",
    "SpecError",
    "StateError",
    "__version__",
    "avg_pool",
    "avg_pool_backward",
    "avg_pool_init",
    "clear",
    "conv",
    "conv_backward",
    "conv_init",
    "conv_transpose",
    "conv_transpose_backward",
    "conv_transpose_init",
    "dropout",
    "dropout_backward",
    "dropout_init",
    "engines",
    "layers",
    "max_pool",
    "max_pool_backward",
    "max_pool_indices",
    "max_pool_init",
    "out_spec",
    "register_pytrees",
    "release_scratch",
    "set_num_threads",
]
