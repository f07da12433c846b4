"""Trains the small tokenizers that tests read, and writes what Hugging Face's tokenizers make of odd texts.

Run by hand, from this folder, with tokenizers 0.20.3:  python make_reference.py
Writes gpt2.json, llama3.json, smollm2.json, qwen2.json (tokenizers, with the pre-tokenizers of the models
they are called after), encodings.json (texts and their ids) and unicode.json (classes of code points, and
hashes of normal forms).
"""
import json
import os

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors, trainers

HERE = os.path.dirname(os.path.abspath(__file__))
CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
LLAMA3 = CL100K % r"\p{N}{1,3}"
QWEN2 = CL100K % r"\p{N}"


def split(pattern):
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])


def train(name, vocabulary, pre_tokenizer, normalizer=None, ignore_merges=False, special=(), added=()):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    with open(os.path.join(HERE, "training.txt"), encoding="utf-8") as file:
        tokenizer.train_from_iterator([file.read()], trainer)
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(list(added))
    content = json.loads(tokenizer.to_str())
    if name == "gpt2":  # as files were before 2024
        content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
    if ignore_merges:
        # A word that no merge makes.
        vocab = content["model"]["vocab"]
        vocab["\u0120harbourmaster"] = len(vocab)
        for token in content["added_tokens"]:
            token["id"] += 1
    with open(os.path.join(HERE, name + ".json"), "w", encoding="utf-8") as file:
        json.dump(content, file, ensure_ascii=False, separators=(",", ":"))
    return Tokenizer.from_file(os.path.join(HERE, name + ".json"))


def texts():
    spaces = [" ", "  ", "   ", "\t", "\t\t", "\n", "\n\n", " \n", "\n ", "\r", "\r\n", "\r\n\r\n", "\u0085",
              "\u00a0", "\u2028", "\u2029", "\u3000", "\u1680", "\u180e", "\u200b", "\u202f", "\u205f", "\x0b",
              "\x0c", "\x00", "\x1c", "\x1f", "\ufeff"]
    yield ""
    with open(os.path.join(HERE, "training.txt"), encoding="utf-8") as file:
        yield file.read()
    for space in spaces:
        yield space
        yield "a" + space + "b" + space + "1" + space + "." + space
        yield space + space + "x" + space + space + "\u5b57"
    yield "".join(spaces)
    yield "It's THEY'RE I'VE we'll you'd I'M 'sabc 'Sabc 'llama '\u017fx '\ufb06x ''s 'x ' s don\u2019t"
    yield "1 12 123 1234 12345 a1b22c333 3.14 1,000 \u0661\u0662\u0663\u0664 \u00bd\u2167 \u2460\u2461 \U00011f50\U0001d2c0x"
    yield "naive na\u00efve nai\u0308ve cafe\u0301 caf\u00e9 A\u030a \u212b \u2126 e\u0323\u0307 e\u0307\u0323 q\u0307\u0323"
    yield "\u1100\u1161\u11a8 \uac00\u11a8 \u1100 \u1161 \uac01 \u0958 \u0915\u093c \u09c7\u09be \u0cc6\u0cc2\u0cd5 \u2000 \u2001"
    yield "\u0301\u0316 \u0300 \u0344 a\u0315\u0300\u05ae\u0301b a\u07fd\u0301 a\u0334\u0898\u0316 \u05e9\u05bc\u05c1 \ufb2c"
    yield "\U0001f642\U0001f6a2 \U0001f44d\U0001f3fd \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f#\ufe0f\u20e3"
    yield "\u8239\u306f\u671d\u306b\u7740\u3044\u305f\u3002\u624b\u7d19 \u6e2f\u53e3\u7684\u4eba\u4eec\uff0c\ubc30\ub294 \uc544\uce68\uc5d0 \U00020000\U0002a6d6"
    yield "<|endoftext|> a<|endoftext|>b <|im_start|>user\nhello<|im_end|>\n<|endoftext <|endoftext|><|endoftext|>  x"
    yield "  <keep>  x  <keep>\n\nx<keep>x <tool><tool>x harbour harbours xharbour harbour_ harbour. \u3000[MASK]\u3000[MASK]"
    yield "caf\u00e9 e cafe\u0301 e caf\u00e9\u0301 e <ab <abc <abcd <abcde harbourmaster the harbourmaster harbourmasters"
    yield "{}[]()<>!!! ?? ... -- /* x */ // y\n#z &&||^~` \\n \\u0041 @a $b %c _d __e__ https://a.b/c?d=e&f=%20#g"
    yield "a" * 300 + " " + "=" * 300 + " " * 300 + "\n" * 30 + "ab" * 150 + " " + "the" * 100
    yield "\u5b57" * 120 + "\U0001f642" * 50 + "\u0301" * 40 + "x"
    yield "x" + "\u0301\u0316" * 60 + "y"
    yield "\ud7ff\ue000\ufffd\uffff\U0010ffff\U000e0001\u0378"


def ranges(points):
    out = []
    for point in points:
        if out and out[-1][1] == point - 1:
            out[-1][1] = point
        else:
            out.append([point, point])
    return out


def blocks(step=0x1000):
    for begin in range(0, 0x110000, step):
        points = [point for point in range(begin, begin + step) if not 0xD800 <= point < 0xE000]
        if points:
            yield begin, points


def matched(pattern):
    """The code points that one-character pattern matches."""
    remover = pre_tokenizers.Split(Regex(pattern), "removed")
    for _, points in blocks():
        kept = set()
        for _, (begin, end) in remover.pre_tokenize_str("".join(map(chr, points))):
            kept.update(range(begin, end))
        yield from (point for i, point in enumerate(points) if i not in kept)


def numeric():
    digits = pre_tokenizers.Digits(individual_digits=True)
    for _, points in blocks():
        text = "".join("a" + chr(point) + "b" for point in points)
        for piece, (begin, end) in digits.pre_tokenize_str(text):
            if end - begin == 1 and begin % 3 == 1:
                yield ord(piece)


def beside(token, before):
    """For every code point, whether the token in front of it, or behind, is found from where the two start."""
    tokenizer = Tokenizer(models.BPE(vocab={"\ue000": 0}, merges=[]))
    tokenizer.add_tokens([token])
    for _, points in blocks():
        pieces = [chr(point) + "@" if before else "@" + chr(point) for point in points]
        encoding = tokenizer.encode("!".join(pieces))
        found = dict(offset for offset, id in zip(encoding.offsets, encoding.ids) if id == 1)
        for i, point in enumerate(points):
            if chr(point) != token.content:
                yield point, 3 * i in found


def fnv(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


def unicode_reference():
    nfc = normalizers.NFC()
    contexts = [["", "\n"], ["a", "\u0301\n"], ["a\u0334", "\u0316\n"], ["\u1100", "\u11a8\n"], ["a\u0315", "\n"]]
    hashes = []
    for _, points in blocks():
        text = "".join(a + chr(point) + b for a, b in contexts for point in points)
        hashes.append("%016x" % fnv(nfc.normalize_str(text).encode()))
    single = AddedToken("@", single_word=True, normalized=False)
    left = AddedToken("@", lstrip=True, normalized=False)
    return {
        "letter": ranges(matched(r"\p{L}")),
        "number": ranges(matched(r"\p{N}")),
        "space": ranges(matched(r"\s")),
        "numeric": ranges(numeric()),
        "word": ranges(point for point, first in beside(single, before=False) if not first),
        "stripped": ranges(point for point, first in beside(left, before=True) if first),
        "nfc_contexts": contexts,
        "nfc_hashes": hashes,
    }


def main():
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    added = [
        AddedToken("<tool>", normalized=False),
        AddedToken("<keep>", lstrip=True, rstrip=True),
        AddedToken("harbour", single_word=True),
        AddedToken("caf\u00e9 e"),
        AddedToken("<ab"),
        AddedToken("<abcd"),
        AddedToken("\n\n\n"),
    ]
    chat = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizers = {
        "gpt2": train("gpt2", 700, byte_level, special=["<|endoftext|>"]),
        "llama3": train("llama3", 800, split(LLAMA3), ignore_merges=True,
                        special=["<|begin_of_text|>", "<|endoftext|>"]),
        "smollm2": train("smollm2", 600, pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), byte_level]), special=chat),
        "qwen2": train("qwen2", 750, split(QWEN2), normalizers.NFC(), special=chat + [
            AddedToken("[MASK]", lstrip=True, normalized=False)], added=added),
    }
    cases = list(texts())
    encodings = {"texts": cases, "ids": {}}
    for name, tokenizer in tokenizers.items():
        encodings["ids"][name] = [tokenizer.encode(text, add_special_tokens=False).ids for text in cases]
    with open(os.path.join(HERE, "encodings.json"), "w", encoding="ascii") as file:
        json.dump(encodings, file, separators=(",", ":"))
    with open(os.path.join(HERE, "unicode.json"), "w", encoding="ascii") as file:
        json.dump(unicode_reference(), file, separators=(",", ":"))


main()
