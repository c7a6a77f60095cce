"""The CUDA kernels pass through Triton's compiler, which needs no device, down to machine code.

The interpreter, in which the kernels' results are tested, is Python and lets pass what the compiler refuses: a variable
whose type changes in a loop, say. Each kernel is compiled in a process without the interpreter.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs triton: pip install triton, where there is one for this platform")

SCRIPT = """
import itertools
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ccssl.credal.kernels import triton as kernels

TYPES = dict.fromkeys(("logits", "pi", "loss", "out", "most"), "*fp32")
TYPES |= dict.fromkeys(("levels", "before", "after", "log_r", "totals", "log_totals", "ratios"), "*fp64")
TYPES |= dict.fromkeys(("counts", "places", "corners"), "*i32") | dict.fromkeys(("top", "order"), "*i64")
TYPES |= dict.fromkeys(("K", "size", "chunks"), "i32")


def compiled(name, warps=4, **constants):
    kernel = getattr(kernels, name)
    names = [parameter.name for parameter in kernel.params]
    signature = {n: "constexpr" if n in constants else TYPES[n] for n in names}
    source = ASTSource(kernel, signature, {(names.index(n),): value for n, value in constants.items()})
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert found.asm["cubin"]


for top, proportional, key in itertools.product([True, False], [True, False], [tl.int32, tl.int64]):
    constants = {"HAS_TOP": top, "PROPORTIONAL": proportional, "GRADIENT": top, "KEY": key}
    compiled("_levels_row", warps=1, BLOCK=32, **constants)
for block, warps in ((32, 1), (256, 4)):
    for precision in ("*fp32", "*fp64"):
        TYPES |= dict.fromkeys(("logits", "pi", "loss", "out", "most"), precision)
        compiled("_real_row", warps=warps, SLACK=1e-6, GRADIENT=True, BLOCK=block)
compiled("_chunks_row", CHUNK=128)
compiled("_join_row", CHUNK=128, CHUNKS=32, FILL=64)
compiled("_spread_row", GRADIENT=True, CHUNK=128)
import ast, inspect
written = {f.name for f in ast.parse(inspect.getsource(kernels)).body if isinstance(f, ast.FunctionDef)}
launched = {name for name in written if name.endswith("_row")}
assert launched == {"_levels_row", "_real_row", "_chunks_row", "_join_row", "_spread_row"}, launched
print("compiled")
"""


def test_every_kernel_compiles_for_a_device_that_is_not_here(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "compiled"
