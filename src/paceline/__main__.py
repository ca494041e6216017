"""`python -m paceline`, which is also how torchrun starts the commands. The commands themselves live in `cli`."""

from paceline.cli.main import main

if __name__ == "__main__":
    main()
