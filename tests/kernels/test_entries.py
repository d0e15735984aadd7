# SPDX-License-Identifier: MIT OR Apache-2.0
"""Entry points are read from a source as a compiler reads them, and every disagreement with the spec is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_runtime.kernel_source import Parameter, check_spec, entries
from gpu_runtime.op import EXACT, OpSpec, scalar, tensor

SPEC = OpSpec(
    name="mix",
    args=(
        tensor("x", "in", "T", "rows", "width"),
        tensor("factor", "in", "f32", "rows"),
        tensor("spans", "in", "u64", "rows", optional=True),
        tensor("scratch", "inout", "u8", "scratch_bytes"),
        tensor("out", "out", "T", "rows", "width"),
        tensor("ids", "out", "i32", "rows"),
        scalar("rows", "i32"),
        scalar("width", "i64"),
        scalar("scratch_bytes", "i64"),
        scalar("seed", "u64"),
        scalar("mask", "u32"),
        scalar("eps", "f32"),
    ),
    tolerance=EXACT,
    aliases=(("x", "out"),),
)

SOURCE = """
struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };

template <typename E>
__device__ void mix(const E* x, E* out, int rows) { if (rows > 0) { out[0] = x[0]; } }

#define ENTRY(T, suffix)                                                                          \\
    extern "C" __global__ void __launch_bounds__(256) mix_##suffix(                               \\
        const T* x, const float* __restrict__ factor, const unsigned long long* spans,            \\
        unsigned char* scratch, T* out, int* ids, int rows, long long width,                      \\
        long long scratch_bytes, unsigned long long seed, unsigned int mask, float eps) {         \\
        mix<T>(x, out, rows);                                                                     \\
    }
ENTRY(float, f32)
ENTRY(f16, f16)
ENTRY(bf16, bf16)
"""

DIRECT = """
#define WIDTH (4)
#define ADD(a, b) ((a) + (b))
extern "C" __device__ int helper(int a) { return ADD(a, WIDTH); }
extern "C" __global__ void declared(float* out);
/* extern "C" __global__ void in_a_comment(float* out) {} */
// extern "C" __global__ void in_another(float* out) {}
template <typename T> __global__ void mangled(T* out) { out[0] = 0; }
extern "C" __global__ void
__launch_bounds__(ADD(128, 128), 2)
later(  // what it does
    float *out /* [rows] */,
    float const * const __restrict__ x,
    const int rows, unsigned n, long long int wide)
{ if (rows) out[n] = x[wide] + helper(rows); }
extern "C" __global__ void nothing() {}
"""


def test_one_macro_for_all_element_types() -> None:
    found = entries(SOURCE)
    assert list(found) == ["mix_f32", "mix_f16", "mix_bf16"]
    for dtype in ("f32", "f16", "bf16"):
        assert found[f"mix_{dtype}"] == (
            Parameter("x", "in", dtype),
            Parameter("factor", "in", "f32", restrict=True),
            Parameter("spans", "in", "u64"),
            Parameter("scratch", "out", "u8"),
            Parameter("out", "out", dtype),
            Parameter("ids", "out", "i32"),
            Parameter("rows", "scalar", "i32"),
            Parameter("width", "scalar", "i64"),
            Parameter("scratch_bytes", "scalar", "i64"),
            Parameter("seed", "scalar", "u64"),
            Parameter("mask", "scalar", "u32"),
            Parameter("eps", "scalar", "f32"),
        )
    check_spec(SPEC, SOURCE)


def test_definitions_without_a_macro() -> None:
    assert entries(DIRECT) == {
        "later": (
            Parameter("out", "out", "f32"),
            Parameter("x", "in", "f32", restrict=True),
            Parameter("rows", "scalar", "i32"),
            Parameter("n", "scalar", "u32"),
            Parameter("wide", "scalar", "i64"),
        ),
        "nothing": (),
    }


def test_a_macro_stands_for_what_it_is_defined_as_at_the_time() -> None:
    text = """
#define ENTRY(T, suffix) extern "C" __global__ void a_##suffix(T* out) { }
ENTRY(float, f32)
#undef ENTRY
__device__ void ENTRY(int a, int b) { }
#define ENTRY(Type, name, more) extern "C" __global__ void more##_ ## name(const Type* x) { }
ENTRY(
    int,
    i32, b
)
"""
    assert entries(text) == {"a_f32": (Parameter("out", "out", "f32"),), "b_i32": (Parameter("x", "in", "i32"),)}


def test_what_is_no_entry_point() -> None:
    assert entries("") == {}
    assert entries('extern "C" { int a; }\n__global__ void mangled(float* x) { }') == {}
    assert entries('#define ENTRY(T) extern "C" __global__ void k(T* x) { }\n') == {}, "never invoked"


def test_an_entry_point_is_defined_once() -> None:
    with pytest.raises(ValueError, match="mix_f32: expected one definition"):
        entries(SOURCE + "ENTRY(float, f32)\n")
    with pytest.raises(ValueError, match="expected a closing parenthesis"):
        entries('extern "C" __global__ void k(float* x {')


@pytest.mark.parametrize(
    ("written", "parameter"),
    [
        ("const float* x", Parameter("x", "in", "f32")),
        ("float const *x", Parameter("x", "in", "f32")),
        ("float*x", Parameter("x", "out", "f32")),
        ("float* const x", Parameter("x", "out", "f32")),
        ("const float* const __restrict__ x", Parameter("x", "in", "f32", True)),
        ("f16* __restrict x", Parameter("x", "out", "f16", True)),
        ("const int n", Parameter("n", "scalar", "i32")),
        ("unsigned long long int n", Parameter("n", "scalar", "u64")),
        ("long unsigned long n", Parameter("n", "scalar", "u64")),
        ("int long long n", Parameter("n", "scalar", "i64")),
        ("unsigned n", Parameter("n", "scalar", "u32")),
        # What has no short name stays as it is, so that it equals none.
        ("long n", Parameter("n", "scalar", "long")),
        ("double n", Parameter("n", "scalar", "double")),
        ("f32 n", Parameter("n", "scalar", "type f32")),
        ("char* n", Parameter("n", "out", "char")),
        ("volatile float* n", Parameter("n", "out", "volatile float")),
        ("float** n", Parameter("float** n", "scalar", "float** n")),
        ("float n[4]", Parameter("float n[4]", "scalar", "float n[4]")),
        ("int& n", Parameter("n", "scalar", "int&")),
    ],
)
def test_parameters(written: str, parameter: Parameter) -> None:
    assert entries(f'extern "C" __global__ void k({written}) {{ }}') == {"k": (parameter,)}


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        # entry points
        ("ENTRY(bf16, bf16)\n", "", "mix_bf16: no such entry point"),
        ("mix_##suffix", "mixed_##suffix", "mixed_f32: an entry point for none of f32, f16, bf16"),
        ("ENTRY(bf16, bf16)\n", "ENTRY(bf16, bf16)\nENTRY(double, f64)\n", "mix_f64: an entry point for none of"),
        ('extern "C" ', "", "mix_f32: no such entry point"),
        ("__global__", "__device__", "mix_f16: no such entry point"),
        ("ENTRY(f16, f16)", "ENTRY(bf16, f16)", r"mix_f16: expected 'const f16\* x', got 'const bf16\* x'"),
        # count, order, names
        (", float eps", "", r"mix_f32: expected the parameters \(x, .*mask, eps\), got \(x, .*mask\)"),
        ("float eps", "float eps, int more", r"got \(.*eps, more\)"),
        ("int* ids, int rows", "int rows, int* ids", r"got \(.*out, rows, ids, width"),
        ("float eps", "float epsilon", r"got \(.*epsilon\)"),
        ("float eps", "float", r"got \(.*float\)"),
        # const or not
        ("const T* x,", "T* x,", r"mix_bf16: expected 'const bf16\* x', got 'bf16\* x'"),
        ("T* out, int*", "const T* out, int*", r"expected 'float\* out', got 'const float\* out'"),
        ("unsigned char* scratch", "const unsigned char* scratch", r"expected 'unsigned char\* scratch'"),
        # pointer or not
        ("int* ids", "int ids", r"expected 'int\* ids', got 'int ids'"),
        ("int rows,", "int* rows,", r"expected 'int rows', got 'int\* rows'"),
        ("const T* x,", "const T** x,", r"got \(const float\*\* x, factor"),
        # element types
        ("const float* __restrict__ factor", "const T* factor", r"mix_f16: expected 'const float\* factor'"),
        ("int* ids", "long long* ids", r"expected 'int\* ids', got 'long long\* ids'"),
        ("const unsigned long long* spans", "const long long* spans", r"got 'const long long\* spans'"),
        ("unsigned char* scratch", "char* scratch", r"got 'char\* scratch'"),
        ("unsigned char* scratch", "void* scratch", r"got 'void\* scratch'"),
        ("const T* x,", "const double* x,", r"mix_f32: expected 'const float\* x', got 'const double\* x'"),
        # scalar types
        ("int rows,", "long long rows,", "expected 'int rows', got 'long long rows'"),
        ("long long width", "int width", "expected 'long long width', got 'int width'"),
        ("long long width", "long width", "expected 'long long width', got 'long width'"),
        ("unsigned long long seed", "long long seed", "got 'long long seed'"),
        ("unsigned int mask", "int mask", "expected 'unsigned int mask', got 'int mask'"),
        ("float eps", "double eps", "expected 'float eps', got 'double eps'"),
        ("float eps", "T eps", "mix_f16: expected 'float eps', got 'f16 eps'"),
        # a promise that aliases break
        ("const T* x,", "const T* __restrict__ x,", "x may share memory"),
        ("T* out, int*", "T* __restrict__ out, int*", "out may share memory"),
    ],
)
def test_a_disagreement_is_found(old: str, new: str, complaint: str) -> None:
    assert SOURCE.count(old) == 1
    with pytest.raises(ValueError, match=complaint):
        check_spec(SPEC, SOURCE.replace(old, new))


def test_every_disagreement_is_listed() -> None:
    wrong = SOURCE.replace("const T* x,", "T* x,").replace("float eps", "double eps").replace("ENTRY(f16, f16)", "")
    with pytest.raises(ValueError, match="disagrees") as caught:
        check_spec(SPEC, wrong)
    assert str(caught.value).splitlines() == [
        "mix: the kernel source disagrees with the spec",
        "mix_f16: no such entry point in the source",
        "mix_f32: expected 'const float* x', got 'float* x'",
        "mix_f32: expected 'float eps', got 'double eps'",
        "mix_bf16: expected 'const bf16* x', got 'bf16* x'",
        "mix_bf16: expected 'float eps', got 'double eps'",
    ]


def test_variants_are_entry_points_of_their_own() -> None:
    spec = replace(SPEC, variants=("wide",))
    names = [f"{dtype}{ending}" for dtype in ("f32", "f16", "bf16") for ending in ("", "_wide")]
    assert list(spec.entries()) == [f"mix_{name}" for name in names]
    assert spec.entries()["mix_bf16_wide"] == "bf16"
    more = "ENTRY(float, f32_wide)\nENTRY(f16, f16_wide)\n"
    with pytest.raises(ValueError, match="mix_bf16_wide: no such entry point"):
        check_spec(spec, SOURCE + more)
    check_spec(spec, SOURCE + more + "ENTRY(bf16, bf16_wide)\n")
    with pytest.raises(ValueError, match="mix_bf16_wide: expected 'const bf16"):
        check_spec(spec, SOURCE + more + "ENTRY(f16, bf16_wide)\n")
    with pytest.raises(ValueError, match="mix_f32_wide: an entry point for none of"):
        check_spec(SPEC, SOURCE + more)


def test_a_library_op_has_no_source() -> None:
    with pytest.raises(ValueError, match="mix: a library op has no kernel source"):
        check_spec(OpSpec(name="mix", args=SPEC.args, tolerance=EXACT, library=True), SOURCE)
