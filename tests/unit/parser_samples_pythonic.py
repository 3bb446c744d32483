"""Outputs in Python's notation, as parser_samples.py has them of the others."""

from __future__ import annotations

from frontend.parsers.tools.pythonic import PythonicParser
from tests.unit.parser_driver import Sample, of

W = '{"city": "Paris", "unit": "celsius"}'
_P = of(PythonicParser)
PYTHONIC = (
    Sample(
        "one", _P, "[get_weather(city='Paris', unit=\"celsius\")]", calls=(("get_weather", W),)
    ),
    Sample(
        "several, every kind of value", _P,
        '[area(shape="it\'s \\"x\\" \\\\ \\u00fc\\t\\x41\\101 🍺", size={"w": [1, (2, 3)], '
        "'n': None}, precision=-2, exact=True,\n points=[], scale=1e3), now( ) ,\n"
        "get_weather(city='''a''' \"b\",)]",
        calls=(
            ("area", '{"shape": "it\'s \\"x\\" \\\\ ü\\tAA 🍺", "size": {"w": [1, [2, 3]], '
             '"n": null}, "precision": -2, "exact": true, "points": [], "scale": 1e3}'),
            ("now", "{}"),
            ("get_weather", '{"city": "ab"}'),
        ),
    ),
    Sample(
        "long strings, with quotes in them", _P,
        '[get_weather(city="""say "hi", ""x"" \\"""", unit=' + "'''it\\'s's'''), "
        "area(shape='', points=['''it's''', \"\", 'b'], exact=True), get_weather(city='''a\nb''')]",
        calls=(
            ("get_weather", '{"city": "say \\"hi\\", \\"\\"x\\"\\" \\"", "unit": "it\'s\'s"}'),
            ("area", '{"shape": "", "points": ["it\'s", "", "b"], "exact": true}'),
            ("get_weather", '{"city": "a\\nb"}'),
        ),
    ),
    Sample(
        "JSON's words, and what is no literal", _P,
        "[area(exact=true, note=null, size={'a': 'b)]'}, points=range(3))]",
        calls=(("area", '{"exact": true, "note": null, "size": {"a": "b)]"}, '
                '"points": "range(3)"}'),),
    ),
    Sample(
        "tags", _P, "I call. <|python_start|>[now()]<|python_end|>", "I call.", (("now", "{}"),)
    ),
    Sample("a list", _P, "[1, 2]", "[1, 2]"),
    Sample("a footnote", _P, " [x] says [now()]", " [x] says [now()]"),
    Sample("another function", _P, "[sum(a=1)]", "[sum(a=1)]"),
    Sample("by position", _P, '[get_weather("Paris")]', '[get_weather("Paris")]'),
    Sample("second is none", _P, "[now(), 3]", ", 3]", (("now", "{}"),)),
    Sample(
        "cut off in a string", _P, '[get_weather(city="Par',
        calls=(("get_weather", '{"city": "Par'),),
    ),
    Sample(
        "cut off in a list", _P, "[now(), area(points=[1, 'a",
        calls=(("now", "{}"), ("area", '{"points": [1, \'a')),
    ),
    Sample(
        "breaks off", _P, "[get_weather(city='a' + 'b')] ok", "+ 'b')] ok",
        (("get_weather", '{"city": "a"'),),
    ),
)  # fmt: skip
