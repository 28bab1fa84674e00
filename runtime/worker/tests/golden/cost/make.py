"""Makes `modules.binpb`, HLO modules (`xla.HloModuleProto`, each after its length), and `costs.txt`: what XLA's own analysis
counts in each, a line a module in the same order: name, flops, transcendentals, bytes accessed.

Run with a Python that has JAX (made with jaxlib 0.12.0.1):  python make.py [FOLDER]
Programs that JAX compiles here stand for whole modules; modules written as text, for single ops.
"""

import os
import pathlib
import re
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax import lax
from jaxlib import _hlo, _jax

FOLDER = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else __file__).resolve()
FOLDER = FOLDER if FOLDER.is_dir() else FOLDER.parent
NAMES = ("flops", "transcendentals", "bytes accessed")


def f32(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def mlp_loss(params, x):
    for w, b in params:
        x = jnp.tanh(x @ w + b)
    return (x**2).mean()


def conv(x, k, **options):
    return lax.conv_general_dilated(x, k, **options)


PROGRAMS = {
    "matmul": (lambda x, y: x @ y, f32(64, 32), f32(32, 16)),
    "batched_dot": (lambda x, y: jnp.einsum("bij,bkj->bik", x, y), f32(3, 8, 5), f32(3, 7, 5)),
    "tanh_sum": (lambda x, y: jnp.tanh(x @ y).sum(), f32(64, 32), f32(32, 16)),
    "elementwise": (lambda x: jnp.where(x > 0, jnp.exp(x) * 2 + 1, x / 3), f32(100, 7)),
    "softmax": (lambda x: jax.nn.softmax(x), f32(32, 100)),
    "gradient": (jax.grad(mlp_loss), [(f32(16, 32), f32(32)), (f32(32, 4), f32(4))], f32(8, 16)),
    "scan": (lambda x: lax.scan(lambda c, _: (c @ x, c.sum()), x, None, length=7), f32(64, 64)),
    "cond": (lambda p, x: lax.cond(p > 0, lambda x: x @ x, lambda x: jnp.sin(x), x), f32(), f32(16, 16)),
    "conv_same": (lambda x, k: conv(x, k, window_strides=(1, 1), padding="SAME"), f32(2, 3, 8, 8), f32(4, 3, 3, 3)),
    "conv_strided": (
        lambda x, k: conv(x, k, window_strides=(2, 3), padding=((2, 1), (0, 3)), rhs_dilation=(2, 1)),
        f32(2, 4, 11, 13),
        f32(6, 4, 3, 2),
    ),
    "conv_holes": (
        lambda x, k: conv(x, k, window_strides=(1, 2), padding=((3, 3), (4, 4)), lhs_dilation=(2, 3)),
        f32(2, 4, 5, 6),
        f32(6, 4, 3, 3),
    ),
    "conv_grouped": (
        lambda x, k: conv(x, k, window_strides=(1, 1), padding="VALID", feature_group_count=2),
        f32(2, 4, 9, 9),
        f32(6, 2, 3, 3),
    ),
    "max_pool": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        f32(2, 8, 8, 3),
    ),
    "cumsum": (lambda x: jnp.cumsum(x, axis=1), f32(8, 16)),
    "argmax": (lambda x: jnp.argmax(x, axis=1), f32(8, 16)),
    "take": (lambda x, i: x[i], f32(20, 3), jax.ShapeDtypeStruct((5,), jnp.int32)),
    "add_at": (lambda x, i, u: x.at[i].add(u), f32(20, 3), jax.ShapeDtypeStruct((5,), jnp.int32), f32(5, 3)),
    "update_slice": (lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), f32(20, 3), f32(2, 3), jnp.int32(1)),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 3)) * 2, f32(20, 3), jnp.int32(1)),
    "constant": (lambda x: x + jnp.arange(100.0) ** 2 + jnp.array([[1.5]]), f32(4, 100)),
    "bfloat16": (lambda x: (x @ x).astype(jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)),
    "random": (lambda k: jax.random.normal(k, (50,)), jax.eval_shape(lambda: jax.random.PRNGKey(0))),
}

SUBS = """
add { x = f32[] parameter(0)
 y = f32[] parameter(1)
 ROOT z = f32[] add(x, y) }
greater { x = f32[] parameter(0)
 y = f32[] parameter(1)
 ROOT z = pred[] compare(x, y), direction=GT }
wrapped { x = f32[10] parameter(0)
 ROOT z = f32[10] add(x, x) }
sliced { x = f32[10] parameter(0)
 s = f32[3] slice(x), slice={[0:3]}
 t = f32[3] slice(x), slice={[1:4]}
 u = (f32[10], f32[10]) parameter(1)
 q = f32[10] get-tuple-element(u), index=0
 v = f32[10] get-tuple-element(u), index=1
 w = f32[3] slice(v), slice={[7:10]}
 c = f32[9] constant({1,2,3,4,5,6,7,8,9})
 d = f32[1] constant({1})
 e = f32[10] add(v, q)
 a = f32[3] add(s, t)
 b = f32[3] multiply(a, w)
 ROOT z = (f32[3], f32[10], f32[9], f32[1]) tuple(b, e, c, d) }
updated { x = f32[10] parameter(0)
 y = f32[2] parameter(1)
 i = s32[] parameter(2)
 ROOT z = f32[10] dynamic-update-slice(x, y, i) }
"""

X = "x = f32[8,16] parameter(0)\n zero = f32[] constant(0)\n "
TEN = "x = f32[10] parameter(0)\n "
OPS = {
    "reduce": X + "ROOT r = f32[16] reduce(x, zero), dimensions={0}, to_apply=add",
    "reduce_window": X + "ROOT r = f32[8,16] reduce-window(x, zero), window={size=1x16 pad=0_0x15_0}, to_apply=add",
    "select_and_scatter": X
    + "y = f32[4,8] parameter(1)\n ROOT r = f32[8,16] select-and-scatter(x, y, zero), window={size=2x2 stride=2x2},"
    " select=greater, scatter=add",
    "all_reduce": X + "ROOT r = (f32[8,16], f32[8,16]) all-reduce(x, x), to_apply=add",
    "reduce_scatter": X + "ROOT r = f32[8,8] reduce-scatter(x), dimensions={1}, to_apply=add",
    "all_gather": X + "ROOT r = f32[16,16] all-gather(x), dimensions={0}",
    "sort": "x = f32[8,17] parameter(0)\n ROOT r = f32[8,17] sort(x), dimensions={1}, to_apply=greater",
    "call": TEN + "ROOT r = f32[10] call(x), to_apply=wrapped",
    "map": TEN + "ROOT r = f32[10] map(x, x), dimensions={0}, to_apply=add",
    "async": TEN + "s = ((f32[10]), f32[10]) async-start(x), calls=wrapped\n ROOT r = f32[10] async-done(s)",
    "fused_slices": TEN
    + "t = (f32[10], f32[10]) tuple(x, x)\n ROOT r = (f32[3], f32[10], f32[9], f32[1]) fusion(x, t), kind=kLoop, calls=sliced",
    "fused_update": TEN
    + "y = f32[2] parameter(1)\n i = s32[] parameter(2)\n ROOT r = f32[10] fusion(x, y, i), kind=kLoop, calls=updated",
    "scatter": TEN
    + "i = s32[4,1] parameter(1)\n u = f32[4] parameter(2)\n ROOT r = f32[10] scatter(x, i, u), update_window_dims={},"
    " inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=add",
    "gather": TEN
    + "i = s32[4,1] parameter(1)\n ROOT r = f32[4] gather(x, i), offset_dims={}, collapsed_slice_dims={0},"
    " start_index_map={0}, index_vector_dim=1, slice_sizes={1}",
    "fft": "x = c64[5,16] parameter(0)\n ROOT r = c64[5,16] fft(x), fft_type=FFT, fft_length={16}",
    "cholesky": "x = f32[5,5] parameter(0)\n ROOT r = f32[5,5] cholesky(x), lower=true",
    "triangular_solve": "x = f32[5,5] parameter(0)\n y = f32[5,4] parameter(1)\n ROOT r = f32[5,4] triangular-solve(x, y),"
    " left_side=true, lower=true, transpose_a=NO_TRANSPOSE",
    "rng_bits": "x = u64[2] parameter(0)\n ROOT r = (u64[2], u32[10]) rng-bit-generator(x), algorithm=rng_philox",
    "barrier": "x = (token[], f32[20], (u8[3], u8[4])) parameter(0)\n"
    " ROOT r = (token[], f32[20], (u8[3], u8[4])) opt-barrier(x)",
    "transpose": "x = f32[8,4]{1,0} parameter(0)\n y = f32[4,8]{0,1} transpose(x), dimensions={1,0}\n"
    " ROOT r = f32[4,8]{1,0} transpose(x), dimensions={1,0}",
    "packed": "x = s4[11]{0:E(4)} parameter(0)\n y = s4[11]{0:E(4)} add(x, x)\n z = s4[11]{0} parameter(1)\n"
    " ROOT r = s4[11]{0} add(z, z)",
}
UNARY = (
    "abs acos acosh asin asinh atanh bitcast bitcast-convert cbrt ceil convert copy cosh cosine count-leading-zeros erf"
    " exponential exponential-minus-one floor is-finite log log-plus-one logistic negate not popcnt round-nearest-afz"
    " round-nearest-even rsqrt sign sine sinh sqrt tan tanh"
).split()
BINARY = (
    "add and atan2 complex divide maximum minimum multiply or power remainder shift-left shift-right-arithmetic"
    " shift-right-logical subtract xor"
).split()


def all_elementwise():
    """Each op on its own number of elements, so that each shows in the sum."""
    lines = []
    size = 1
    for op in UNARY + BINARY:
        size += 1
        integers = op in ("and", "count-leading-zeros", "not", "or", "popcnt", "xor") or op.startswith("shift")
        given = f"{'s32' if integers else 'f32'}[{size}]"
        made = {"is-finite": f"pred[{size}]", "complex": f"c64[{size}]"}.get(op, given)
        operands = "x{0}, x{0}" if op in BINARY else "x{0}"
        lines.append(f"x{size} = {given} parameter({size - 2})")
        lines.append(f"y{size} = {made} {op}({operands.format(size)})")
    lines.append("z = c64[200] parameter(%d)" % (size - 1))
    lines.append("zr = f32[200] real(z)\n zi = f32[200] imag(z)\n zp = pred[200] compare(zr, zi), direction=LT")
    lines.append("zs = f32[200] select(zp, zr, zi)\n zc = f32[200] clamp(zr, zs, zi)")
    lines.append("ROOT r = f32[200] reduce-precision(zc), exponent_bits=4, mantissa_bits=4")
    return "\n ".join(lines)


def varint(number):
    head = b""
    while number >= 0x80:
        head += bytes([number & 0x7F | 0x80])
        number >>= 7
    return head + bytes([number])


def add(name, text):
    # Without metadata, which has the place of this checkout and JAX's lines.
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    text = re.sub(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d+ .*\n)+", "\n", text)
    module = _hlo.hlo_module_from_text(text)
    found = _jax.hlo_module_cost_analysis(jax.devices()[0].client, module)
    data = module.as_serialized_hlo_module_proto()
    modules.append(varint(len(data)) + data)
    costs.append(f"{name} " + " ".join(str(found.get(number, 0.0)) for number in NAMES))


modules, costs = [], []
for name, (function, *arguments) in PROGRAMS.items():
    add(name, jax.jit(function).lower(*arguments).compile().as_text())
for name, text in {**OPS, "elementwise_ops": all_elementwise()}.items():
    add(f"op_{name}", f"HloModule {name}\n{SUBS}\nENTRY e {{ {text} }}")
(FOLDER / "modules.binpb").write_bytes(b"".join(modules))
(FOLDER / "costs.txt").write_text("".join(f"{line}\n" for line in costs))
