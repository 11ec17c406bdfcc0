from pathlib import Path

import pytest

from shared.cost.catalogue import Catalogue, bytes_of, precision_of
from shared.errors import InvalidRequest, NotFound

# What the catalogue must know, by the names that people use.
WANTED = """
T4, V100-16, V100-32, A10, A30, A40, A100-40-PCIe, A100-80-PCIe, A100-40, A100-80, A5000, A6000, 3090Ti,
4090, L4, L40S, RTX PRO 6000, H100 PCIe, H100 SXM, H200, B200, MI210, MI250, MI300X, Gaudi 2, Gaudi 3,
Ascend 910B, CPU, 2080 Ti, 3080, 3090, 4080, 5080, RTX 6000 Ada, A800, H800, L20, L40, GH200, GB200,
MI300A, MI350X, MI355X, Ascend 910C, P40, H100-64GB, H100-96GB, DGX Spark, NVIDIA GB10, Ryzen AI Max,
Arc Pro B60
"""

ENTRY = """
Mine:
  vendor: Acme
  memory_gib: 16
  bandwidth_gb_s: 500
  compute_units: 10
  matrix_tflops: {fp16: 50}
  mode: dense
  links: {scale_up: 10, pcie: 16, network: 1}
  price_usd_hour: 0.1
  source: me
"""


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return Catalogue.built_in()


def test_holds_what_the_issue_lists(catalogue: Catalogue) -> None:
    for name in WANTED.replace("\n", " ").split(","):
        assert catalogue.get(name.strip()).memory_bytes > 0
    assert len({a.vendor for a in catalogue.all()}) >= 4


def test_every_entry_is_complete_plausible_and_found(catalogue: Catalogue) -> None:
    for a in catalogue.all():
        assert catalogue.get(a.name) is a
        assert a.source
        assert a.mode
        assert 0 < a.price_usd_hour < 20
        assert 4e9 < a.memory_bytes < 500e9
        assert 1e11 < a.bandwidth_bytes_s < 1e13
        assert 1e12 < a.flops("bf16") < 1e16
        assert min(a.links.pcie, a.links.scale_up, a.links.network) > 0


def test_cache_and_shared_memory_may_be_left_out(catalogue: Catalogue, tmp_path: Path) -> None:
    a100 = catalogue.get("A100")
    assert (a100.cache_bytes, a100.unit_memory_bytes) == (40 * 2**20, 164 * 2**10)
    path = tmp_path / "mine.yaml"
    path.write_text(ENTRY, encoding="utf-8")
    assert catalogue.with_file(path).get("Mine").cache_bytes == 0.0


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),  # nvidia-smi
        ("NVIDIA GeForce RTX 2080 Ti", "RTX-2080-Ti"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA A800-SXM4-80GB", "A800-SXM-80"),
        ("NVIDIA H800", "H800-SXM"),
        ("NVIDIA GH200 480GB", "GH200-96"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA L40", "L40"),
        ("Tesla P40", "P40"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16"),
        ("AMD Instinct MI300A", "MI300A"),  # rocm-smi
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("AMD Instinct MI355X", "MI355X"),
        ("910B4", "Ascend-910B4"),  # npu-smi
        *((name, "A100-SXM-80") for name in ("a100-sxm-80", "A100_SXM_80", "A100", "a100 80gb")),
    ],
)
def test_names_match_loosely_and_as_the_vendors_tools_print_them(catalogue: Catalogue, printed: str, name: str) -> None:
    assert catalogue.get(printed).name == name


def test_dense_rates_not_sparse_ones(catalogue: Catalogue) -> None:
    # The data sheets print 1979 and 624 for these with sparsity.
    assert catalogue.get("H100").flops("bf16") == pytest.approx(989.4e12)
    assert catalogue.get("A100").flops("fp16") == pytest.approx(312e12)
    assert catalogue.get("A6000").flops("fp16") == pytest.approx(154.8e12)


def test_a_missing_precision_computes_in_another(catalogue: Catalogue) -> None:
    assert catalogue.get("V100").flops("bf16") == catalogue.get("V100").flops("fp16")
    assert catalogue.get("A100").flops("fp8") == catalogue.get("A100").flops("bf16")  # weight-only


def test_an_unknown_name_gets_near_matches(catalogue: Catalogue) -> None:
    with pytest.raises(NotFound, match=r"unknown accelerator 'H10O'; did you mean H100-SXM"):
        catalogue.get("H10O")
    with pytest.raises(NotFound, match=r"known: P40, T4"):
        catalogue.get("???")


def test_users_add_and_replace(catalogue: Catalogue, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(ENTRY + ENTRY.replace("Mine:", "T4:"), encoding="utf-8")
    extended = catalogue.with_file(own)
    assert extended.get("mine").bandwidth_bytes_s == 500e9
    assert extended.get("T4").vendor == "Acme"
    assert catalogue.get("T4").vendor == "NVIDIA"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("  memory_gib: 16\n", ""), r"own.yaml: accelerator 'Mine': .*memory_gib"),
        (("memory_gib: 16", "memory_gib: -1"), r"accelerator 'Mine': Expected `float` > 0.0 - at `\$.memory_gib`"),
        (("source: me", "source: me\n  cache_mib: -1"), r"'Mine': Expected `float` >= 0.0 - at `\$.cache_mib`"),
        (("fp16: 50", "fp16: 0"), r"accelerator 'Mine': Expected `float` > 0.0 - at `\$.matrix_tflops\[...\]`"),
        (("fp16: 50", "fp17: 50"), r"unknown precision 'fp17'"),
        (("vendor", "vendr"), r"accelerator 'Mine': .*vend"),
        (("{fp16: 50}", "{fp16: 50"), r"own.yaml:\d+: not valid YAML"),
    ],
)
def test_a_bad_file_names_file_entry_and_key(
    catalogue: Catalogue, tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    own = tmp_path / "own.yaml"
    with pytest.raises(InvalidRequest, match=r"own.yaml: cannot be read"):
        catalogue.with_file(own)
    own.write_text(ENTRY.replace(*change), encoding="utf-8")
    with pytest.raises(InvalidRequest, match=said):
        catalogue.with_file(own)


def test_precisions() -> None:
    assert precision_of("bfloat16") == "bf16"
    assert bytes_of("float16") == 2
    assert bytes_of("nvfp4") == 0.5
    with pytest.raises(InvalidRequest, match="unknown precision 'q3'"):
        precision_of("q3")
