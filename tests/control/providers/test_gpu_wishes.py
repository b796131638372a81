"""Which machines somebody means who writes `RTX 4090, L40S`, `24GB+`, `H100:8`, `any` or `none`."""

from __future__ import annotations

import msgspec
import pytest

from tests.control.providers.test_gpus import SPELLINGS
from tests.fixtures.market import H100, Market
from torpor.control.providers.gpu_wishes import wishes_of
from torpor.control.providers.gpus import GpuModel, parse_gpu
from torpor.control.providers.offers import asked, misfit
from torpor.control.providers.vast_gpus import GPU_NAMES
from torpor.control.rental.search import find_offers
from torpor.shared.errors import InvalidInput, NoOffer
from torpor.shared.values import Want

replace = msgspec.structs.replace
CARD = replace(H100, gpu=GpuModel("RTX 4090", "", 24), gpu_count=1)


@pytest.mark.parametrize("text", [*GPU_NAMES, *(name for of in SPELLINGS.values() for name in of)])
def test_every_spelling_that_a_market_uses_is_understood(text: str) -> None:
    (wish,) = wishes_of(Want(gpu=text))
    assert wish.gpu == parse_gpu(text)


@pytest.mark.parametrize("text", ["24 GB", "24GB", "24GB+", "24 GiB+"])
def test_memory_alone_fits_each_model_that_has_as_much(text: str) -> None:
    assert misfit(CARD, Want(gpu=text)) == ""
    small = replace(CARD, gpu=GpuModel("RTX 3060", "", 12))
    assert misfit(small, Want(gpu=text)) == "each of its GPUs has 12 GiB, 24 GiB is wanted"
    unknown = replace(CARD, gpu=GpuModel("RTX 4090"))
    assert "unknown memory" in misfit(unknown, Want(gpu=text))
    none = replace(CARD, gpu=None, gpu_count=0)
    assert misfit(none, Want(gpu=text)) == f"it has no GPU, {text} is wanted"


@pytest.mark.parametrize(
    ("text", "count", "has", "fits"),
    [
        ("H100:2", 1, 2, True),
        ("H100:4", 1, 2, False),
        ("H100", 4, 2, False),
        ("A100:80GB:2, H100 80GB:1", 1, 1, True),
        ("4x H100", 1, 2, False),  # as offers write it
        ("2 x H100 SXM", 1, 2, True),
        ("1x H100", 4, 2, False),  # a block in which the number of GPUs counted alone
        ("any:3", 1, 2, False),
    ],
)
def test_a_wish_says_how_many_gpus_or_the_block_does(
    text: str, count: int, has: int, fits: bool
) -> None:
    assert (misfit(replace(H100, gpu_count=has), Want(gpu=text, gpu_count=count)) == "") is fits


def test_any_is_any_gpu_none_is_a_machine_without_one_and_nothing_is_any_machine() -> None:
    bare = replace(H100, gpu=None, gpu_count=0)
    for want, fitting in ((Want(gpu="any"), [H100]), (Want(gpu="none"), [bare])):
        assert [offer for offer in (H100, bare) if not misfit(offer, want)] == fitting
    assert misfit(H100, Want(gpu="none")) == "it has a GPU, H100 SXM, none is wanted"
    assert misfit(H100, Want()) == misfit(bare, Want()) == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("NVIDIA", "write models in order of preference, as in `RTX 4090, L40S`"),
        ("GPU", "`any` for any GPU"),
        ("RTX", "is not understood"),
        ("24 potatoes", "is not understood"),
        ("H100, ", "the GPU '' is not understood"),
        ("titan rtz", "Did you mean TITANRTX"),
        ("H100 8x", "the number of GPUs in 'H100 8x' is not understood"),
        ("H100 x8", "the number of GPUs"),
        ("H100:8 80GB", "the number of GPUs"),
        ("H100:17", "1 to 16 times"),
        ("H100:0", "1 to 16 times"),
        (", ".join(["H100"] * 17), "name 16 at most"),
    ],
)
def test_a_wish_that_is_not_understood_is_refused_with_what_would_be(text: str, says: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        find_offers([Market()], Want(gpu=text))
    assert says in str(refused.value)


def test_a_model_without_offers_that_nobody_knows_is_named_with_the_nearest() -> None:
    with pytest.raises(NoOffer, match=r"does not know the GPU RTX 4909 \(did you mean RTX 4090"):
        find_offers([Market()], Want(gpu="RTX 4909"))
    with pytest.raises(NoOffer) as known:
        find_offers([Market()], Want(gpu="RTX 4090"))
    assert "does not know" not in str(known.value)


def test_the_first_model_that_has_a_fitting_offer_comes_first_whatever_it_costs() -> None:
    market = Market()
    market.on_sale = [
        replace(H100, id="cheap", gpu=GpuModel("L40S", "", 48), price_usd_h=0.5),
        replace(H100, id="dear", gpu=GpuModel("RTX 4090", "", 24), price_usd_h=1.0),
        replace(H100, id="dearer", gpu=GpuModel("RTX 4090", "", 24), price_usd_h=1.5),
        replace(H100, id="other", gpu=GpuModel("A10", "", 24), price_usd_h=0.1),
    ]

    def fitting(**changes: object) -> list[str]:
        want = Want(gpu="RTX 4090, L40S", **changes)  # type: ignore[arg-type]
        return [offer.id for offer in find_offers([market], want).fitting]

    assert fitting() == ["dear", "dearer", "cheap"]
    assert fitting(rank="order") == ["dear", "dearer", "cheap"]
    assert fitting(max_price_usd_h=1.2) == ["dear", "cheap"]
    assert fitting(max_price_usd_h=0.6) == ["cheap"]
    found = find_offers([market], Want(gpu="L40S, RTX 4090")).refused
    assert [refused.outcome for refused in found] == [
        "its GPU is A10, L40S is wanted; its GPU is A10, RTX 4090 is wanted"
    ]


def test_a_market_is_asked_once_for_each_number_of_gpus() -> None:
    wants = asked(Want(gpu="H100:8, RTX 4090, A100:8, none", gpu_count=2, disk_gib=7))
    assert [(want.gpu, want.gpu_count, want.disk_gib) for want in wants] == [
        ("H100, A100", 8, 7),
        ("RTX 4090", 2, 7),
        ("none", 1, 7),
    ]
    assert asked(Want(disk_gib=7)) == [Want(disk_gib=7)]


def test_an_offer_that_two_answers_show_stands_once() -> None:
    found = find_offers([Market()], Want(gpu="H100:2, H100:1"))
    assert [offer.id for offer in found.fitting] == ["1"]
