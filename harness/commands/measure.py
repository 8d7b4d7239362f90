"""``pairbench run`` and ``pairbench check``: measure, or only tell right from wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.commands import options

Names = Annotated[list[str] | None, typer.Argument(help="Techniques; all when none is named.", show_default=False)]
Tier = Annotated[
    str | None,
    typer.Option(
        help="smoke (two CPU cores, seconds), quick (nightly on a GPU) or full; smoke on a CPU, quick on a GPU."
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Variants = Annotated[list[str] | None, typer.Option("--variant", help="Only these variants (and the baseline).")]
Workloads = Annotated[list[str] | None, typer.Option("--workload", help="Only these workloads, of any tier.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE: your own shape, on each chosen workload.")]
Json = Annotated[bool, typer.Option("--json", help="Print the records as JSON.")]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(run)
    app.command()(check)


def run(
    techniques: Names = None,
    tier: Tier = None,
    variant: Variants = None,
    workload: Workloads = None,
    set_: Sets = None,
    workload_file: Annotated[Path | None, typer.Option(help="A JSON list of workloads of your own.")] = None,
    device: Device = "auto",
    ranks: Annotated[int | None, typer.Option(min=1, help="Processes, for workloads that run on several.")] = None,
    model: Annotated[str | None, typer.Option(help="A Hugging Face folder or GGUF file with real weights.")] = None,
    trace: Annotated[str | None, typer.Option(help="A request trace, for serve runs.")] = None,
    request_rate: Annotated[
        str | None, typer.Option(help="Requests a second for serve runs; 1,2,4 measures each: a curve.")
    ] = None,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Requests that run at once in serve runs.")] = None,
    peer_endpoint: Annotated[
        str | None,
        typer.Option(help="Measure the OpenAI-compatible server at this URL instead of our own engine."),
    ] = None,
    peer_model: Annotated[str, typer.Option(help="The server's model, when it has several.")] = "",
    samples: Annotated[int | None, typer.Option(min=1, help="Exactly so many samples of each variant.")] = None,
    budget: Annotated[float | None, typer.Option(min=0, help="Seconds of sampling for each technique.")] = None,
    timeout: Annotated[float | None, typer.Option(min=1, help="Seconds a technique may take in all.")] = None,
    within: Annotated[
        float | None, typer.Option(min=0, help="Seconds after which no further workload begins; says what is left.")
    ] = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="Only workloads that no history has an outcome of on this GPU type.")
    ] = False,
    slo_ttft: Annotated[
        float | None, typer.Option(help="Goodput counts requests whose TTFT is within this (s).")
    ] = None,
    slo_tpot: Annotated[
        float | None, typer.Option(help="Goodput counts requests whose TPOT is within this (s).")
    ] = None,
    gpu_hour_price: Annotated[
        float | None, typer.Option(min=0, help="Price of a GPU hour, for cost per token.")
    ] = None,
    share_gpus: Annotated[
        bool, typer.Option(help="Allow more ranks than GPUs (gloo; correctness, not speed).")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of inputs and orders.")] = 0,
    store: Annotated[str | None, typer.Option(help="Folder or URL to keep the records in.")] = None,
    no_store: Annotated[bool, typer.Option("--no-store", help="Keep nothing.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Write the figures as CSV too.")] = None,
    json: Json = False,
) -> None:
    """Check, measure, record and print: speedup over the baseline and over the best one-line peer, memory, limit."""
    from harness.plan import Request
    from harness.serving.sweep import parse_rates
    from harness.session import Options, Session

    chosen = options.device(device)
    request = Request(
        names=techniques or (),
        tier=tier or ("quick" if chosen == "cuda" else "smoke"),
        variants=variant or (),
        workloads=workload or (),
        settings={**options.settings(set_ or ()), **({"slots": str(max_concurrency)} if max_concurrency else {})},
        workload_file=workload_file,
        ranks=ranks,
        model=model,
        trace=trace,
        rates=parse_rates(request_rate) if request_rate is not None else (),
    )
    asked = Options(
        device=chosen,
        store=None if no_store else store,
        keep=not no_store,
        samples=samples,
        budget_s=budget,
        limit_s=timeout,
        within_s=within,
        missing=missing,
        seed=seed,
        share_gpus=share_gpus,
        slo=(slo_ttft, slo_tpot),
        gpu_hour_price=gpu_hour_price,
        csv=csv,
        timing=peer_endpoint is None,
        peer=_peer(peer_endpoint, peer_model, max_concurrency) if peer_endpoint is not None else None,
        argv=sys.argv[1:],
    )
    _finish(Session(request, asked, _reporter(json)).run(), json)


def _peer(url: str, model: str, max_concurrency: int | None) -> Any:
    """The server; a key that it asks for comes from PAIRBENCH_PEER_KEY, so that none stands on a command line."""
    from harness.serving.endpoint import Endpoint
    from harness.serving.peer_runner import Peer

    key = os.environ.get("PAIRBENCH_PEER_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return Peer(Endpoint(url, model=model, headers=headers), max_concurrency or 0)


def check(
    techniques: Names = None,
    tier: Tier = None,
    variant: Variants = None,
    workload: Workloads = None,
    set_: Sets = None,
    device: Device = "auto",
    ranks: Annotated[int | None, typer.Option(min=1, help="Processes, for workloads that run on several.")] = None,
    model: Annotated[str | None, typer.Option(help="A Hugging Face folder or GGUF file with real weights.")] = None,
    trace: Annotated[str | None, typer.Option(help="A request trace, for serve runs.")] = None,
    timeout: Annotated[float | None, typer.Option(min=1, help="Seconds a technique may take in all.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of inputs and orders.")] = 0,
    json: Json = False,
) -> None:
    """Correctness only; on a CPU, Triton kernels run through the interpreter."""
    from harness.plan import Request
    from harness.session import Options, Session

    chosen = options.device(device)
    request = Request(
        names=techniques or (),
        tier=tier or ("quick" if chosen == "cuda" else "smoke"),
        variants=variant or (),
        workloads=workload or (),
        settings=options.settings(set_ or ()),
        ranks=ranks,
        model=model,
        trace=trace,
    )
    asked = Options(device=chosen, keep=False, timing=False, limit_s=timeout, seed=seed, argv=sys.argv[1:])
    _finish(Session(request, asked, _reporter(json)).run(), json)


def _reporter(json: bool) -> Any:
    from harness.report import Reporter

    return Reporter(quiet_table=json)


def _finish(result: Any, json: bool) -> None:
    if json:
        options.print_json([_plain(r) for r in result.records])
    raise typer.Exit(result.exit_code)


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    return dict(record)
