"""A group of commands with a default."""

import click


class DefaultGroup(click.Group):
    """A group that runs its command `list` unless another one is named: `autotune studies NAME` lists NAME.

    A study whose name is that of a command is shown with `autotune studies list NAME`.
    """

    default = "list"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, *ctx.help_option_names):
            args = [self.default, *args]
        return super().parse_args(ctx, args)
