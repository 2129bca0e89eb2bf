"""The checks can fail: each runs on a small made-up repository with one fault. `python3 tools/tests/test_checks.py`"""

from __future__ import annotations

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import check_docs
import check_layers
import check_size

ARCHITECTURE = """
## Who may include whom

| rank | rooms | torch headers |
|---|---|---|
| 0 | `base` | none but `base/shape.h` |
| 1 | `ops`, `checkpoint` | yes |
| 1 | `tokenizer`, `checkpoint/safetensors*` | none |
| 2 | `ops/**/layer*`, `data` | yes |
| 3 | `model` | yes |
| 4 | `train`, `infer` | yes |
| 7 | `app`, `tests`, `*_test.cpp` | yes |
"""


class Repository(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.write("ARCHITECTURE.md", ARCHITECTURE)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class Layers(Repository):
    def faults(self, source: str, *includes: str) -> list[str]:
        self.write(
            source, "".join(f"#include {name if name[0] == '<' else chr(34) + name + chr(34)}\n" for name in includes)
        )
        return check_layers.check(self.root)

    def test_downward_and_own_room_pass(self) -> None:
        self.assertEqual(
            self.faults("furlong/model/a.cpp", "furlong/model/b.h", "furlong/ops/kda/layer.h", "<ATen/core/Tensor.h>"),
            [],
        )
        self.assertEqual(
            self.faults("furlong/ops/kda/layer.cpp", "furlong/ops/norm/norm.h", "furlong/ops/situ/layer.h"), []
        )
        self.assertEqual(
            self.faults("furlong/ops/kda/kda.cpp", "furlong/ops/common/linear.h", "furlong/base/shape.h"), []
        )
        self.assertEqual(self.faults("furlong/ops/kda/kda_test.cpp", "furlong/model/b.h", "tests/support/a.h"), [])
        self.assertEqual(self.faults("furlong/base/shape.h", "<c10/util/ArrayRef.h>"), [])

    def test_upward_fails(self) -> None:
        self.assertIn("rank 1 may not include rank 3", self.faults("furlong/ops/kda/kda.cpp", "furlong/model/b.h")[0])
        self.assertIn(
            "rank 1 may not include rank 2", self.faults("furlong/ops/kda/kda.cpp", "furlong/ops/kda/layer.h")[0]
        )

    def test_sideways_fails(self) -> None:
        self.assertIn("sideways", self.faults("furlong/train/a.cpp", "furlong/infer/b.h")[0])

    def test_another_operator_fails(self) -> None:
        self.assertIn("sideways", self.faults("furlong/ops/kda/kda.cpp", "furlong/ops/norm/norm.h")[0])

    def test_a_stated_exception_passes(self) -> None:
        self.write(
            "ARCHITECTURE.md", ARCHITECTURE + "\n- `furlong/ops/moe/*` includes `furlong/ops/situ/situ.h`: reason\n"
        )
        self.assertEqual(self.faults("furlong/ops/moe/experts/a.h", "furlong/ops/situ/situ.h"), [])
        self.assertEqual(len(self.faults("furlong/ops/moe/experts/a.h", "furlong/ops/norm/norm.h")), 1)

    def test_linked_base_in_the_operator_library_fails(self) -> None:
        self.assertIn("header-only", self.faults("furlong/ops/kda/cpu.cpp", "furlong/base/json.h")[0])

    def test_torch_fails_where_it_is_forbidden(self) -> None:
        for source in ("furlong/base/a.h", "furlong/tokenizer/a.cpp", "furlong/checkpoint/safetensors.cpp"):
            faults = self.faults(source, "<ATen/core/Tensor.h>")
            self.assertIn("no torch header", faults[-1])
            (self.root / source).unlink()
        self.assertEqual(self.faults("furlong/checkpoint/named_tensors.h", "<ATen/core/Tensor.h>"), [])

    def test_unknown_room_fails(self) -> None:
        self.assertIn("no room", self.faults("furlong/attic/a.cpp")[0])


class Size(Repository):
    def test_long_file_fails_unless_exempt(self) -> None:
        self.write("furlong/base/a.cpp", "int x;\n" * 601)
        self.assertIn("601 lines", check_size.check(self.root, {})[0][0])
        self.assertEqual(check_size.check(self.root, {"furlong/base/a.cpp": "reason"})[0], [])
        self.write("furlong/base/a.cu", "int x;\n" * 601)
        self.assertEqual(len(check_size.check(self.root, {})[0]), 1)

    def test_needless_exemption_fails(self) -> None:
        self.write("furlong/base/a.cpp", "int x;\n")
        self.assertEqual(len(check_size.check(self.root, {"furlong/base/a.cpp": "", "gone.cpp": ""})[0]), 2)

    def test_long_function_is_an_outlier(self) -> None:
        body = "  if (x) {\n  }\n" * 40
        self.write(
            "furlong/base/a.cpp",
            f"namespace a {{\nint short_one() {{ return 1; }}\nint long_one(int x) {{\n{body}}}\n}}\n",
        )
        faults, outliers = check_size.check(self.root, {})
        self.assertEqual(faults, [])
        self.assertEqual(outliers, ["furlong/base/a.cpp:3: long_one: 82 lines"])


class Docs(Repository):
    def setUp(self) -> None:
        super().setUp()
        self.write("ARCHITECTURE.md", "")
        self.write("app/cmd_train.cpp", 'app.add_subcommand("train", ""); command->add_option("--out", out);')
        self.write("app/cmd_data.cpp", 'group.add_subcommand("prepare", ""); app.add_subcommand("data", "");')
        self.write("furlong/ops/kda/kda.h", "")
        self.write("runs/demo.sh", "")

    def faults(self, text: str) -> list[str]:
        self.write("README.md", text)
        return check_docs.check(self.root, {"packages.example.net"})

    def test_what_exists_passes(self) -> None:
        text = (
            "`furlong/ops/kda`, `kda.h`, `furlong/ops/*/kda.h`, `app/cmd_{train,data}.cpp`, `x_test.cpp`, `out/a.md`,"
            " [demo](runs/demo.sh), `furlong train CONFIG.toml --out DIR`, `build/cpu/bin/furlong data prepare`\n"
            "```\nbash runs/demo.sh\nfurlong train a.toml \\\n  --out b\n```\n"
        )
        self.assertEqual(self.faults(text), [])

    def test_what_does_not_exist_fails(self) -> None:
        for text in (
            "`furlong/ops/mla/mla.h`",
            "`mla.h`",
            "`app/cmd_{train,gone}.cpp`",
            "`furlong/*/gone.h`",
            "[demo](runs/gone.sh)",
            "`bash runs/gone.sh`",
            "`furlong fly`",
            "`furlong data fly`",
            "`furlong train --fast`",
            "`build/cpu/bin/gone_test`",
            "```\nfurlong train a.toml \\\n  --fast\n```",
        ):
            self.assertEqual(len(self.faults(text)), 1, text)

    def test_private_names_fail(self) -> None:
        self.assertIn("a path of one machine", self.faults("see " + "/" + "work/main")[0])
        self.assertIn("names the package host", self.faults("pip install -i https://packages.example.net/x")[0])
        self.assertEqual(self.faults("furlong/workers and network/root"), [])


if __name__ == "__main__":
    unittest.main()
