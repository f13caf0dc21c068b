"""Texts on which tokenizers differ: rare characters, whitespace, digits, special tokens."""

from __future__ import annotations

import random

ADVERSARIAL = [
    "",
    " ",
    "Hello world",
    "  leading and trailing  ",
    "\n\n\n",
    " \n \t\t \r\n x\r",
    "a  b   c    d",
    "don't I'LL We'Ve it's THEY'RE 'tis ''''' 'S",
    "123 4567 89012 3.14 1,000,000 007",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 ✅",
    "中文字符，测试。日本語テスト 한국어",
    "สวัสดี नमस्ते مرحبا שלום",
    "naïve café — “quotes” … a\u0301e\u0308",
    "½ Ⅷ ² ٣٤ ﬁ straße ǅungla İ",
    "zero\u200bwidth\u00a0no\u3000wide\ufeff",
    "\u0001\u007f\x00 nul",
    "𝕳𝖊𝖑𝖑𝖔 𐍈 \U0010ffff\ue000",
    "camelCaseHTTPServer ABCdefGHI XMLíÉ",
    'if (x == 3) { return "y"; } // ~~!!?? --- === $$$ ^^^',
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_end|><|im_end|> <|endoftext|>x<|im_start",
    "<s>x</s> <unk> <0x41> <0x0A> <tag>▁under▁▁<tag> </tag>",
    "a" * 300,
    " " * 70 + "x",
    "\n" * 40,
    "\x00\x04\x06\x13 a\x14b \x16\x1d\x1b[31m\x85\x9f",
    "\ufeff\u2028\u2029\u00ad\u202e\ue000\ufffd\uffff \u1680\u2003\u3000",
    "👨🏽‍💻👩‍❤️‍💋‍👨🇩🇪🇩🏴\U000e0067\U000e0062\U000e007f\u200d\u200d1️⃣",
]
# code points, without surrogates
RANGES = [
    (0, 31),
    (32, 126),
    (32, 0x2FF),
    (0x300, 0x33FF),
    (0x4E00, 0x9FFF),
    (0xA000, 0xD7FF),
    (0xE000, 0xFFFF),
    (0x1F300, 0x1F9FF),
    (0x10000, 0x10FFFF),
]
_WORDS = ("the quick", " fox", "Jumps", "123", " 45", "'s", "<|im_end|>", "<tag>", "  ", "\u200d")
_SPACES = " \t\n\r\v\f\u00a0\u2003\u3000"


def adversarial_texts(count: int) -> list[str]:
    """ADVERSARIAL, and `count` texts of its parts and random characters; the same in each call."""
    chance = random.Random(count)
    return ADVERSARIAL + [
        "".join(_part(chance) for _ in range(chance.randint(1, 10))) for _ in range(count)
    ]


def _part(chance: random.Random) -> str:
    match chance.randrange(6):
        case 0:
            return chance.choice(ADVERSARIAL)
        case 1:
            pairs = [chance.choice(RANGES) for _ in range(chance.randint(1, 8))]
            return "".join(chr(chance.randint(*pair)) for pair in pairs)
        case 2:
            return "".join(chance.choices(_SPACES, k=chance.randint(1, 8)))
        case 3:
            return chance.choice("a 0=é😀\n") * chance.choice((3, 40, 300))
        case 4:
            return str(chance.randrange(10 ** chance.randint(1, 30)))
    return chance.choice(_WORDS)
