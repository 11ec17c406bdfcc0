from pathlib import Path

import pytest

from shared.cost.efficiency import EfficiencyTable
from shared.cost.library import Library
from shared.errors import InvalidRequest


def test_every_device_of_the_catalogue_has_constants(library: Library) -> None:
    for name in library.catalogue.names():
        constants = library.efficiencies.for_device(name)
        assert 0.2 < constants.gemm_for("bf16").compute <= 1.1
        assert 0.2 < constants.decode_for("bf16").memory.share <= 1.1


def test_constants_name_their_date_and_tables(library: Library) -> None:
    table = library.efficiencies
    assert table.date.startswith("20")
    for name in table.fitted():
        assert table.for_device(name).sources
        library.catalogue.get(name)
    assert table.for_device("A10").sources == ()  # stands on another's


def test_like_another_and_by_default() -> None:
    library = Library.built_in()
    of = library.efficiencies.for_device
    assert of("A100-SXM-40").gemm == of("A100-SXM-80").gemm
    assert of("A10").gemm == of("A40").gemm  # A10 is like A40, which has its own products ...
    assert of("A10").decode == of("A100-SXM-80").decode  # ... and is like an A100 otherwise
    assert of("MI300X").gemm == of("Ascend-910B").gemm


def test_precisions_stand_in_for_each_other(library: Library) -> None:
    h100 = library.efficiencies.for_device("H100-SXM")
    assert h100.gemm_for("fp16") == h100.gemm_for("bf16")
    assert h100.gemm_for("fp8") != h100.gemm_for("bf16")
    assert h100.gemm_for("int4") == h100.gemm_for("bf16")


def test_a_bad_constant_names_file_and_device() -> None:
    table = EfficiencyTable({"devices": {"A40": {"step_s": "soon"}}}, "mine.yaml")
    with pytest.raises(InvalidRequest, match=r"mine.yaml: device 'A40': "):
        table.for_device("A40")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"none.yaml: cannot be read"):
        EfficiencyTable.from_file(tmp_path / "none.yaml")


def test_links_without_a_fabric_take_the_constants_of_pcie(library: Library) -> None:
    for name, fabric in (("RTX-PRO-6000-Server", False), ("A10", False), ("L40S", False), ("A100-SXM-80", True)):
        fitted, links = library.efficiencies.for_device(name), library.catalogue.get(name).links
        assert fitted.collective_over(links) is (fitted.collective if fabric else fitted.pcie_collective)


def test_constants_of_experts_by_precision_as_a_checkpoint_names_it(library: Library) -> None:
    hopper = library.efficiencies.for_device("H200-SXM")
    assert hopper.experts_for("fp8_block").gemm is hopper.experts["fp8_block"]
    assert hopper.experts_for("fp8").gemm is hopper.experts["fp8"]
    assert hopper.gemm_for("fp8_block") is not hopper.gemm_for("fp8")
    assert hopper.gemm_for("float8") is hopper.gemm_for("fp8")
