"""Where the time of a step goes: kernels by name, kind and time."""

import json
import shlex
import sys

import pytest
import torch
from typer.testing import CliRunner

from oelm.bench import profile
from oelm.bench.profile import REST, kind_of, profile_kernels
from oelm.cli.app import app
from oelm.runs.schema import parse_bench

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<96>>", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 64>", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>", "attention"),
        ("_mix_part", "attention"),
        ("join_parts", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "matrix products"),
        ("aten::addmm", "matrix products"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimiser"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", REST),
        ("aten::mul", REST),
    ],
)
def test_the_kind_of_a_kernel(name, kind):
    assert kind_of(name) == kind


def test_every_launch_is_counted_and_no_time_is_lost(monkeypatch):
    left, right = torch.randn(2, 64, 64)

    def step():
        return (left @ right + left @ left).exp().sqrt()

    kernels = {kernel.name: kernel for kernel in profile_kernels(step, 5, CPU)}
    assert kernels["aten::mm"].launches == 2
    assert kernels["aten::exp"].launches == 1
    assert all(kernel.ms > 0 for kernel in kernels.values())
    monkeypatch.setattr(profile, "_LISTED", 1)
    first, *others = profile_kernels(step, 5, CPU)
    assert not first.name.endswith("others")
    assert {kernel.name.split()[-1] for kernel in others} == {"others"}
    counted = {kernel.name.split()[0] for kernel in others}
    assert sum(map(int, counted)) <= len(kernels), "one entry for each kind of the others"


@pytest.mark.parametrize("decode", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_profiled_benchmark_says_where_the_time_goes(decode, monkeypatch):
    """As a table, and in the record, which names the command and the code that made it."""
    arguments = ["bench", "multi-head", "identity-channel", "--model", "gpt:modern-tiny", "--profile", "--rounds", "1"]
    arguments += ["--steps", "1", "--batch-size", "1", "--sequence-length", "16", "model.fields.num_hidden_layers=1"]
    arguments += ["--decode"] if decode else []
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    for words in ("where the time goes", "all kernels", "the longest kernels of identity-channel"):
        assert words in shown.stdout
    monkeypatch.setattr(sys, "argv", ["oelm", *arguments, "--json"])
    rows = parse_bench(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert [row.arm for row in rows] == ["multi-head", "identity-channel"]
    for row in rows:
        assert {"matrix products", REST} <= {kernel.kind for kernel in row.kernels}
        assert row.origin is not None
        assert row.origin.command == shlex.join(["oelm", *arguments, "--json"])


def test_without_profile_no_kernel_is_recorded():
    arguments = ["bench", "baseline", "--rounds", "1", "--steps", "1", "--batch-size", "1", "--sequence-length", "16"]
    shown = CliRunner().invoke(app, [*arguments, "--json", "model.fields.num_hidden_layers=1"])
    assert json.loads(shown.stdout)[0]["kernels"] == []
