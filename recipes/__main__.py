"""python -m recipes: the commands there are."""

import sys

from recipes.support import CONF


def main() -> None:
    from recipes.support.help import list_of_commands, no_such_command

    names = [word for word in sys.argv[1:] if not word.startswith("-")]
    if names:
        sys.exit(no_such_command(names[0], CONF))
    print(list_of_commands(CONF))


if __name__ == "__main__":
    main()
