"""The commands, one a file."""

import click

import reactivate
from reactivate.cli.commands.demo import demo
from reactivate.cli.commands.devices import devices
from reactivate.cli.commands.doctor import doctor
from reactivate.cli.commands.explain import explain
from reactivate.cli.commands.plan import plan
from reactivate.cli.commands.run import run
from reactivate.cli.commands.show import show
from reactivate.cli.commands.verify import verify
from reactivate.cli.outcome import Commands

__all__ = ["command"]


@click.group(cls=Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(reactivate.__version__, prog_name="reactivate")
@click.pass_context
def command(ctx: click.Context) -> None:
    """Activation checkpointing for PyTorch, planned to fit and verified bit for bit.

    A TARGET is `package.module:factory`, a function that returns a model, (model, args) or (model, args, kwargs); or a
    config of transformers: the name of its class (LlamaConfig), a config.json or its folder. Nothing is downloaded.

    Exit codes: 0 success; 1 no (nothing fits, not the same); 2 usage; 3 an extra is not installed; 4 exception; 130
    interrupted.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for each in (plan, show, verify, explain, run, demo, devices, doctor):
    command.add_command(each)
