"""Compiles for an H200 on a machine without a GPU; nothing runs, so this tells neither results nor
speed.

Lowering needs jax alone. Compiling to machine code needs its CUDA plugin and ptxas, no driver:

    V=$(python -c 'import jax; print(jax.__version__)')
    pip install "jax-cuda13-plugin==$V" "jax-cuda13-pjrt==$V" nvidia-cuda-nvcc
"""

import dataclasses
import importlib.util
import re
import tempfile
from pathlib import Path

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)

HAVE_PLUGIN = importlib.util.find_spec("jax_plugins") is not None and (
    importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
)

NEEDS_PLUGIN = pytest.mark.skipif(
    not HAVE_PLUGIN,
    reason="jax's CUDA plugin is not installed: see tests/pallas/h200.py for the command",
)

# The device as XLA describes one, after the public data sheet and the limits of sm_90.
TARGET = """gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 patch: 0 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """launches: names of the kernels that the program launches, of XLA's and of ours.
    copies: whether it copies a buffer. aliased, temporary: bytes. thunks: all steps, as XLA prints
    them.
    """

    launches: tuple[str, ...]
    thunks: str
    copies: bool
    aliased: int
    temporary: int


def lowered(fn, *avals) -> str:
    """The program that XLA would get for an H200, as text."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with use_abstract_mesh(mesh):
        return jax.jit(fn).trace(*avals).lower(lowering_platforms=("cuda",)).as_text()


def compiled(fn, *avals, donate_argnums=()) -> Compiled:
    """Compiles to machine code. Raises JaxRuntimeError for spilled registers, ValueError or
    JaxRuntimeError for more shared memory than a block may have.
    """
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET, topology="1x1x1"
    )
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("x",))
    whole = NamedSharding(mesh, PartitionSpec())

    def place(aval):
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=whole)

    with tempfile.TemporaryDirectory() as folder, use_abstract_mesh(mesh.abstract_mesh):
        program = jax.jit(fn, donate_argnums=donate_argnums).lower(*jax.tree.map(place, avals))
        options = {
            "xla_dump_to": folder, "xla_gpu_fail_ptx_compilation_on_register_spilling": True,
            "xla_backend_optimization_level": 3,  # whatever the tests on a CPU run at
        }
        memory = program.compile(compiler_options=options).memory_analysis()
        files = sorted(Path(folder).glob("*.thunk_sequence*.txt"))
        final = [file for file in files if "after_thunk_passes" in file.name]
        thunks = "\n".join(file.read_text() for file in final or files)
    return Compiled(
        launches=tuple(re.findall(r"\] (\S+) grid: \[", thunks)), copies="kCopy" in thunks,
        thunks=thunks, aliased=memory.alias_size_in_bytes, temporary=memory.temp_size_in_bytes,
    )
