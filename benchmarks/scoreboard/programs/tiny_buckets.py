"""Sends every gradient as a separate message."""

from loop import Program, main


class TinyBuckets(Program):
    title = "tiny buckets"
    causes = ("buckets",)
    width, depth, batch = 64, 40, 256

    def configure(self):
        self.wrapper_options = {} if self.cured else {"bucket_cap_mb": 0.001}


if __name__ == "__main__":
    main(TinyBuckets)
