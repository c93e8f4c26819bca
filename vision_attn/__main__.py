"""``python -m vision_attn``: the same as ``vision-attn``."""

import sys

from vision_attn.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
