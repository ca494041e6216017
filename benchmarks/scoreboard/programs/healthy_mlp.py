"""A multilayer perceptron that mostly computes."""

from loop import Program, main


class HealthyMlp(Program):
    title = "healthy: multilayer perceptron"


if __name__ == "__main__":
    main(HealthyMlp)
