"""`polyphase render kubernetes`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from services.launcher.cluster_file import load_cluster
from services.launcher.render.manifests import Rendered, as_text, render, write
from services.launcher.render.options import RenderOptions

render_app = typer.Typer(no_args_is_help=True, help="Manifests for orchestrators, from a cluster file.")


@render_app.callback()
def render_group() -> None:
    """Manifests for orchestrators, from a cluster file."""


@render_app.command("kubernetes")
def kubernetes_command(
    file: Annotated[Path, typer.Argument(help="A cluster file, or the name of one that is shipped.")],
    out: Annotated[str, typer.Option(help="A folder for a file each; -: all of them to standard output.")] = "-",
    namespace: Annotated[str, typer.Option(help="Default: polyphase.")] = "",
    image: Annotated[str, typer.Option(help="Of everything without an accelerator; default: polyphase:cpu.")] = "",
    gpu_image: Annotated[str, typer.Option(help="Of instances on NVIDIA GPUs; default: polyphase:gpu.")] = "",
    model: Annotated[str, typer.Option(help="As pods find it, where the file names a folder of this machine.")] = "",
    options: Annotated[Path | None, typer.Option(help="A YAML file of all options: see docs/kubernetes.md.")] = None,
    with_postgres: Annotated[bool, typer.Option("--with-postgres", help="A database of one pod, to try out.")] = False,
    with_secrets: Annotated[bool, typer.Option("--with-secrets", help="A Secret too: keys in CLEAR.")] = False,
) -> None:
    """Manifests that run what a cluster file says: StatefulSets, Services, probes, drains, budgets, metrics."""
    given = {"namespace": namespace, "image": image, "model": model}
    said: dict[str, object] = {key: value for key, value in given.items() if value}
    if gpu_image:
        said["images"] = {"NVIDIA": gpu_image}
    chosen = RenderOptions.read(options, **said)
    if with_postgres:
        chosen = chosen.model_copy(update={"postgres": chosen.postgres.model_copy(update={"enabled": True})})
    rendered = render(load_cluster(file), chosen, str(file), with_secrets=with_secrets)
    if out == "-":
        print(as_text(rendered.objects), end="")
    else:
        for written in write(rendered, Path(out)):
            print(written)
    if not with_secrets:
        print(_how(rendered, chosen), file=sys.stderr)


def _how(rendered: Rendered, options: RenderOptions) -> str:
    """How the Secret is made that the manifests name."""
    words = [f"  --from-file={key}" if "." in key else f"  --from-literal={key}=…" for key in rendered.secret_keys]
    make = f"kubectl -n {options.namespace} create secret generic {options.secret}"
    return "Keys are not rendered. Make their Secret first (docs/kubernetes.md):\n" + " \\\n".join([make, *words])
