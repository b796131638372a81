"""Ask a provider block what it can do, before anything is rented: account, abilities, offers.

    python -m deployments.market vast-provider/NAME [--gpu "RTX 4090"] [--disk 50] [--spot allowed]

It reads only. Run it once for each new block, to see that the market answers as torpor expects.
Without a block, it prints the abilities at every market (docs/providers.md), and asks none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import get_type_hints

import msgspec

from blocks import PROVIDERS, ProviderBlock
from blocks.reference import load
from torpor.control.providers.offers import Offer, asked, misfit
from torpor.control.providers.provider import Abilities, Provider
from torpor.control.rental.search import sold
from torpor.shared.errors import TorporError
from torpor.shared.values import Want


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m deployments.market", description=__doc__)
    parser.add_argument("block", nargs="?", help="a provider block, as type/name")
    parser.add_argument("--gpu", help="a GPU model, such as H100 SXM")
    parser.add_argument("--count", type=int, default=1, help="the number of GPUs")
    parser.add_argument("--disk", type=float, default=50.0, help="the smallest disk, in GiB")
    parser.add_argument("--image", default="", help="a container image to check")
    parser.add_argument("--spot", choices=["never", "allowed", "only"], default="allowed")
    parser.add_argument("--most", type=int, default=20, help="how many offers to print")
    asked = parser.parse_args(argv)
    if asked.block is None:
        for kind in PROVIDERS:
            print(*(f"{name_of(kind)}: {one}" for one in _words(abilities_of(kind))), sep="\n")
        return 0
    want = Want(gpu=asked.gpu, gpu_count=asked.count, disk_gib=asked.disk, spot=asked.spot)
    try:
        provider = load(asked.block, PROVIDERS, of="this command").open()
        for line in described(provider, want, image=asked.image, most=asked.most):
            print(line)
    except TorporError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def described(provider: Provider, want: Want, *, image: str = "", most: int = 20) -> list[str]:
    """What ``provider`` says of itself, and the cheapest offers that fit ``want``."""
    account = provider.check(image)
    balance = "" if account.balance_usd is None else f", balance {account.balance_usd:.2f} $"
    lines = [f"provider  {provider.identity}", f"account   {account.name}{balance}"]
    lines += [f"          {note}" for note in account.notes]
    lines += [f"ability   {one}" for one in _words(provider.abilities)]
    lines += [f"machine   {m.id} {m.state} of {m.label}" for m in provider.list_own()]
    offers = sold(provider, asked(want))
    fitting = sorted((o for o in offers if not misfit(o, want)), key=lambda o: o.price_usd_h)
    lines.append(f"offers    {len(fitting)} of {len(offers)} fit, {min(most, len(fitting))} shown")
    return lines + [_line(offer) for offer in fitting[:most]]


def abilities_of(kind: type[ProviderBlock]) -> Abilities:
    """The abilities of the adapter that the block opens, if no setting of the block changes
    them."""
    abilities: Abilities = get_type_hints(kind.open)["return"].abilities
    return abilities


def name_of(kind: type[ProviderBlock]) -> str:
    """The market's name, as the forms show it."""
    return kind.get_block_type_name().removesuffix(" Provider")


def _words(abilities: Abilities) -> list[str]:
    told = msgspec.structs.asdict(abilities) | {"checkpoint": abilities.checkpoint}
    return [f"{name} = {value}" for name, value in told.items()]


def _line(offer: Offer) -> str:
    reliability = " reliability not stated" if offer.many_owners else ""
    if offer.reliability is not None:
        reliability = f" reliability {offer.reliability:.3f}"
    cuda = "" if offer.cuda is None else f" CUDA {offer.cuda[0]}.{offer.cuda[1]}"
    spot = " spot" if offer.spot else ""
    gpu = f"{offer.gpu_count}x {offer.gpu}" if offer.gpu else "no GPU"
    about = f"{offer.id}{spot}{cuda}{reliability}"
    return f"  {offer.price_usd_h:8.3f} $/h  {gpu}  {offer.region}  {about}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
