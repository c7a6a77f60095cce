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
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ccssl.credal.kernels import triton as kernels

REAL, DOUBLE, INT, LONG = "*fp32", "*fp64", "*i32", "*i64"
TYPES = {
    "logits": REAL, "pi": REAL, "loss": REAL, "out": REAL, "most": REAL, "counts": INT, "top": INT, "order": LONG,
    "peaks": DOUBLE, "masses": DOUBLE, "before": DOUBLE, "after": DOUBLE, "totals": DOUBLE, "log_r": DOUBLE,
    "start": INT, "stop": INT, "K": "i32", "size": "i32", "split": "i32", "chunks": "i32", "width": "i32",
}


def compiled(name, warps=4, **constants):
    kernel = getattr(kernels, name)
    names = [parameter.name for parameter in kernel.params]
    signature = {n: "constexpr" if n in constants else TYPES[n] for n in names}
    source = ASTSource(kernel, signature, {(names.index(n),): value for n, value in constants.items()})
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert found.asm["cubin"]


tiles = {"CLASSES": 32, "GROUPS": 128}
for top, proportional, whole in itertools.product([True, False], repeat=3):
    compiled(
        "_levels_row", HAS_TOP=top, PROPORTIONAL=proportional, GRADIENT=proportional, WHOLE=whole, **tiles
    )
compiled("_measure_row", HAS_TOP=True, **tiles)
compiled("_measure_row", HAS_TOP=False, **tiles)
compiled("_sorted_row", SLACK=1e-6, GRADIENT=True, BLOCK=128)
compiled("_chunks_row", CHUNK=128)
compiled("_merge_row", warps=1, CHUNK=128, CHUNKS=32, FILL=64)
compiled("_spread_row", GRADIENT=True, CHUNK=128, CHUNKS=32)
import ast, inspect
written = {f.name for f in ast.parse(inspect.getsource(kernels)).body if isinstance(f, ast.FunctionDef)}
launched = {name for name in written if name.endswith("_row")}
assert launched == {"_levels_row", "_measure_row", "_sorted_row", "_chunks_row", "_merge_row", "_spread_row"}, launched
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
