r"""An adversarial probe of the math rule: what a policy might write to be rewarded for less than the answer,
(reference, answer) each, and right answers that look alike. The kinds are other ones than those of `math_answers.py`.

Answers are what a response has in its box, except for the kinds in WHOLE_RESPONSES.
"""

Pair = tuple[str, str]

WHOLE_RESPONSES = frozenset(["several boxes", "hedges and negations"])

RIGHT: dict[str, list[Pair]] = {
    "choices": [
        ("A", "Option A"), ("Option A", "A"), ("\\text{Option C}", "C"), ("(B)", "Option B"), ("option D", "\\text{(D)}"),
        ("A", "\\textbf{(A)}"), ("C", "Choice C"), ("Option B", "(B)"), ("A", "option (A)"),
    ],
    "speeds and compound units": [
        ("60 km/h", "60 kmph"), ("60 \\text{ kmph}", "60 \\text{ km/h}"), ("60 km/h", "60 kph"), ("60 \\text{ km/hr}", "60 km/h"),
        ("60 mph", "60 mi/h"), ("60 \\text{ miles per hour}", "60 mph"), ("5 m/s", "5m/s"), ("5 \\text{ m/s}", "5m/s"),
        ("60 km/h", "60km/h"), ("9.8 m/s^2", "9.8m/s^2"), ("60 \\text{ kilometers per hour}", "60 km/h"),
        ("12 g/cm^3", "12g/cm^3"), ("5 \\text{ meters per second}", "5 m/s"), ("60", "60 kmph"),
        ("72 \\text{ km per hour}", "72"),
    ],
    "labels without colons": [
        ("1, 3", "maximum 3, minimum 1"), ("1,3", "minimum 1 and maximum 3"), ("Maximum: 3, Minimum: 1", "max 3, min 1"),
        ("-2, 5", "\\text{maximum } 5, \\text{ minimum } -2"), ("5", "maximum 5"),
        ("maximum 3, minimum 1", "Minimum: 1, Maximum: 3"), ("\\frac{1}{2}, 4", "Maximum value 4, minimum value \\frac{1}{2}"),
        ("3", "minimum value 3"),
    ],
    "products of letters": [
        ("P+Pr", "P(1+r)"), ("P(1+r)", "P+Pr"), ("P(1+r)", "P + rP"), ("P(1+r)^2", "P + 2Pr + Pr^2"), ("P(1-d)", "P - Pd"),
        ("T(1+a)", "T + aT"), ("P + Prt", "P(1 + rt)"),
    ],
    "signs": [
        ("-3", "−3"), ("-\\frac{1}{2}", "\\frac{1}{-2}"), ("-x+1", "1 - x"), ("-(-3)", "3"), ("-5", "(-5)"), ("3", "+3"),
        ("-2\\sqrt{3}", "-\\sqrt{12}"), ("-\\frac{a}{b}", "\\frac{-a}{b}"), ("-0.5", "-\\frac12"),
    ],
    "percent and per mille": [
        ("12.5\\%", "12.5 percent"), ("12.5\\%", "0.125"), ("12.5\\%", "\\frac{1}{8}"), ("150\\%", "1.5"), ("150\\%", "150"),
        ("25 \\text{ percent}", "25\\%"), ("0.07", "7\\%"), ("33\\frac{1}{3}\\%", "\\frac{1}{3}"),
    ],
    "intervals and inequalities": [
        ("(-\\infty, 3]", "x \\le 3"), ("x \\le 3", "3 \\ge x"), ("[2, 5)", "2 \\le x < 5"),
        ("x < -1 \\text{ or } x > 1", "(-\\infty,-1) \\cup (1,\\infty)"), ("-2 < x < 2", "(-2, 2)"), ("x \\ge 0", "[0, \\infty)"),
        ("(0, 1) \\cup (1, 2)", "0 < x < 1 \\text{ or } 1 < x < 2"), ("x \\neq 0", "(-\\infty, 0) \\cup (0, \\infty)"),
        ("a > -3", "-3 < a"),
    ],
    "sets, lists and tuples": [
        ("\\{1, 2, 3\\}", "\\{3, 1, 2\\}"), ("1, 2, 3", "1, 2 \\text{ and } 3"), ("(1, 2, 3)", "\\left(1, 2, 3\\right)"),
        ("\\{-1, 1\\}", "\\pm 1"), ("2, 3, 5, 7", "7, 5, 3, 2"), ("(\\frac{1}{2}, 3)", "(0.5, 3)"), ("\\{0\\}", "0"),
        ("(3, -4)", "x = 3, y = -4"),
    ],
    "matrices and vectors": [
        ("\\begin{pmatrix} 1 & 0 \\\\ 0 & 1 \\end{pmatrix}", "\\begin{bmatrix} 1 & 0 \\\\ 0 & 1 \\end{bmatrix}"),
        ("\\begin{pmatrix} 1 \\\\ 2 \\\\ 3 \\end{pmatrix}", "(1, 2, 3)"),
        ("\\begin{pmatrix} 1/2 & 0 \\\\ 0 & 2 \\end{pmatrix}", "\\begin{pmatrix} 0.5 & 0 \\\\ 0 & \\frac{4}{2} \\end{pmatrix}"),
        ("2\\mathbf{i} - \\mathbf{j}", "-\\mathbf{j} + 2\\mathbf{i}"), ("(1, -2)", "\\left( 1 , -2 \\right)"),
        ("\\begin{bmatrix} a & b \\\\ c & d \\end{bmatrix}", "\\begin{pmatrix} a & b \\\\ c & d \\end{pmatrix}"),
        ("3\\vec{a} - 2\\vec{b}", "-2\\vec{b} + 3\\vec{a}"),
    ],
    "powers of ten and bases": [
        ("3 \\times 10^8", "300000000"), ("3 \\times 10^8", "3e8"), ("6.02 \\times 10^{23}", "6.02e23"), ("0.001", "10^{-3}"),
        ("1.5 \\times 10^{-4}", "0.00015"), ("101_2", "(101)_2"), ("101_2", "101_{2}"), ("3 \\times 10^8", "3 \\cdot 10^8"),
        ("1{,}000{,}000", "10^6"),
    ],
    "fractions in words": [
        ("\\frac{3}{4}", "three quarters"), ("\\frac{1}{2}", "one half"), ("\\frac{2}{3}", "two-thirds"),
        ("\\frac{5}{8}", "five eighths"), ("1.5", "one and a half"), ("\\frac{1}{3}", "one third"), ("\\frac14", "a quarter"),
        ("7", "seven"),
    ],
    "times, dates and money": [
        ("3:45", "3:45"), ("5:30 PM", "5:30 PM"), ("\\$12.50", "12.50"), ("\\$12.50", "\\$12.5"), ("12.5", "\\$12.50"),
        ("€20", "20 euros"), ("\\text{March 5}", "March 5"), ("Tuesday", "\\text{Tuesday}"), ("\\$1,250", "1250 dollars"),
        ("50 \\text{ cents}", "50"),
    ],
    "ratios": [
        ("2:3", "4:6"), ("1:2:3", "2:4:6"), ("3:1", "3"), ("\\frac{2}{3}", "2:3"), ("0.5:1", "1:2"), ("2:3", "\\frac{2}{3}"),
        ("12:9", "4:3"),
    ],
    "several boxes": [
        ("3", "First \\boxed{2} is wrong. So the answer is \\boxed{3}."), ("3", "\\boxed{3}. Check: \\boxed{3}."),
        ("1, 2", "$\\boxed{1}$ and $\\boxed{2}$"), ("x = 3", "\\boxed{x = 3}"), ("3", "We get $\\boxed{3}$ apples."),
        ("3", "$$\\boxed{3}$$"), ("\\frac{1}{2}", "**Answer:** $\\boxed{\\frac12}$"), ("3", "Answer: \\fbox{3}"),
    ],
    "hedges and negations": [
        ("3", "Therefore the answer is 3."), ("3", "It is not 2, it is 3."), ("3", "The answer is not 4; the answer is 3."),
        ("3", "No other value works, so the answer is 3."), ("3", "There is no doubt: the answer is 3."),
        ("-3", "So the answer is -3."), ("3", "Not only that, the final answer is $3$."), ("3", "Answer: 3"),
    ],
    "lookalikes": [
        ("x^2", "x²"), ("\\frac{1}{2}", "½"), ("5 - 3x", "5 – 3x"), ("2\\pi", "2π"), ("x \\le 5", "x ≤ 5"), ("\\sqrt{2}", "√2"),
        ("2 \\times 3", "6"), ("x \\ne 1", "x ≠ 1"), ("10\\%", "10％"),
    ],
}  # fmt: skip

WRONG: dict[str, list[Pair]] = {
    "choices": [
        ("A", "Option B"), ("A", "Options A and B"), ("A", "not A"), ("Option A", "B"), ("Option A", "Option"),
        ("A", "Option A or B"), ("A", "Not option A"), ("Option A", "A and B"), ("A", "Option A is wrong"), ("A", "neither A"),
        ("A", "Options A, B, C, D"), ("A", "A, B, C, D"), ("Option AB", "A"), ("A", "Option a or Option b"),
        ("Option A", "every option but A"), ("A", "all options"), ("B", "Option A B"), ("A", "Option A+1"), ("A", "option -A"),
        ("Option A", "Option AB"), ("A", "Option A'"), ("Option 1", "A"), ("C", "\\text{Option C is incorrect}"),
    ],
    "speeds and compound units": [
        ("60 km/h", "60 mph"), ("60 mph", "60 kmph"), ("60 km/h", "60 m/s"), ("60 kmph", "60 km"), ("5 m/s", "5ms"),
        ("5 m/s", "5m"), ("5 m/s", "5s/m"), ("60 km/h", "60 h/km"), ("60 kph", "60 mi/h"), ("5 m/s", "5 m/s^2"),
        ("60 km/h", "60 km/s"), ("5 m/s", "5m/h"), ("5m/s", "5m/t"), ("60 mi/h", "60 mi"), ("60 mph", "60 miles per minute"),
        ("x m/s", "x/s"), ("12 g/cm^3", "12 g/cm^2"), ("12 kg/m^3", "12 g/m^3"), ("5m/n", "5"), ("72 km/h", "20 m/s squared"),
        ("5 m/s", "-5m/s"), ("5", "5 m per 2 s"),
    ],
    "labels without colons": [
        ("1, 3", "maximum 1, minimum 3"), ("3", "maximum 3, minimum 1"), ("1, 3", "maximum 3"),
        ("1, 3", "not maximum 3, minimum 1"), ("Maximum: 3, Minimum: 1", "maximum 1, minimum 3"),
        ("1, 3", "maximum 3, minimum 1, mean 2"), ("1, 3", "maximum -3, minimum 1"), ("Minimum: 3", "maximum 3"),
        ("maximum 3", "minimum 3"), ("maximum 3", "minimum: 3"), ("1, 3", "minus 3, minimum 1"), ("3", "at maximum 3"),
        ("3", "maximum 3 or 4"), ("3", "minus 3"), ("3", "negative 3"), ("3", "less 3"), ("3", "twice 3"), ("3", "half 3"),
        ("3", "about 3"), ("3", "error 3"),
    ],
    "products of letters": [
        ("P+Pr", "P(1-r)"), ("P+Pr", "P(r)"), ("P(1+r)", "P + r"), ("P(A)", "PA"), ("P(A+B)", "P(A)+P(B)"), ("E(X+Y)", "EX+EY"),
        ("f(x+1)", "fx+f"), ("P(X)", "XP"), ("E(X+1)", "EX + E"), ("f(1+x)", "f + fx"), ("P(1+X)", "P + PX"),
        ("T(n-1)", "Tn - T"), ("P(1+r)", "P(1+r)^2"), ("P(1+r)", "P + Pr + 1"), ("P(1+r)", "Pr"), ("g(x+h)", "gx+gh"),
        ("E(2X+1)", "2EX + E"), ("E(1+x)", "E + Ex"), ("g(1+t)", "g + gt"), ("F(1 - k)", "F - kF"), ("f(a+b)", "fa + fb"),
        ("P(A \\cup B)", "P(A) + P(B)"),
    ],
    "signs": [
        ("-3", "3"), ("3", "--3 + 6 - 6 - 6"), ("3", "-(3)"), ("3", "\\frac{-3}{1}"), ("-\\frac12", "\\frac12"), ("-x", "x"),
        ("3", "3-"), ("a-b", "b-a"), ("|x|", "x"), ("-5", "|-5|"), ("\\pm 3", "3"), ("\\pm 3", "-3"), ("3", "\\pm 3"),
        ("3", "\\mp 3"), ("1 \\pm \\sqrt{2}", "1 + \\sqrt{2}"), ("1 \\pm \\sqrt{2}", "1 \\pm \\sqrt{3}"),
        ("\\pm\\frac12", "\\frac12"), ("-3", "(3)"), ("3", "¬3"), ("-3", "~3"), ("3", "–3"),
    ],
    "percent and per mille": [
        ("12.5\\%", "1.25"), ("12.5\\%", "12.5‰"), ("5", "5‰"), ("0.05", "5"), ("5\\%", "0.5"), ("0.5\\%", "0.5 \\text{ cm}"),
        ("7", "0.07\\%"), ("20\\%", "20\\% \\text{ off}"), ("20\\%", "-20\\%"), ("20\\%", "120\\%"),
        ("5", "5 \\text{ percentage of } 100"), ("30", "30\\% \\text{ of } 30"), ("25\\%", "25 \\text{ per mille}"),
        ("25\\%", "\\frac{1}{25}"), ("100", "1"), ("1", "100"), ("200\\%", "0.2"),
    ],
    "intervals and inequalities": [
        ("(-\\infty, 3]", "x < 3"), ("(-\\infty, 3]", "x \\ge 3"), ("[2, 5)", "[2, 5]"), ("[2, 5)", "(2, 5)"),
        ("[2, 5)", "2 < x \\le 5"), ("-2 < x < 2", "x < 2"), ("-2 < x < 2", "x > -2"), ("-2 < x < 2", "-2 > x > 2"),
        ("x > 3", "x > -3"), ("x > 3", "3"), ("3", "x > 3"), ("3", "x \\ge 3"), ("x < -1 \\text{ or } x > 1", "-1 < x < 1"),
        ("x < -1 \\text{ or } x > 1", "x < -1 \\text{ and } x > 1"), ("(1, 2)", "(1, 2) \\cup (3, 4)"),
        ("(1, \\infty)", "(1, -\\infty)"), ("x \\ne 0", "x = 0"), ("x \\ne 0", "x > 0"), ("[0, 1]", "\\{0, 1\\}"),
        ("\\mathbb{R}", "\\mathbb{Z}"), ("(1, 3)", "1 < y < 3 \\text{ and } x > 0"), ("x > 3", "-x > -3"),
        ("x \\ge 2", "x \\ge 2 \\text{ or } x < 0"), ("(2, 3)", "(3, 2)"),
    ],
    "sets, lists and tuples": [
        ("\\{1, 2, 3\\}", "\\{1, 2, 3, 4\\}"), ("\\{1, 2, 3\\}", "\\{1, 2\\}"), ("1, 2, 3", "1, 2, 3, 3"),
        ("(1, 2, 3)", "(3, 2, 1)"), ("(1, 2)", "\\{1, 2\\}"), ("3", "1, 2, 3"), ("3", "3, 3.5"), ("3", "\\{3, 4\\}"),
        ("3", "(3, 4)"), ("3", "[3]x"), ("x = 1, y = 2", "x = 2, y = 1"), ("x = 1, y = 2", "1, 2, 3"), ("(3, -4)", "(3, 4)"),
        ("(3, -4)", "(-4, 3)"), ("a = 1, b = 2", "b = 1, a = 2"), ("2, 3", "2 \\cdot 3"), ("2, 3", "23"), ("2, 3", "2.3"),
        ("12", "1, 2"), ("\\{1, 2\\}", "\\{1\\} \\cup \\{3\\}"), ("1, 2", "1 \\text{ to } 2"), ("1, 2, 3", "1, \\ldots, 3"),
        ("1, 2, 3", "1, 2, \\ldots"),
    ],
    "matrices and vectors": [
        ("\\begin{pmatrix} 1 & 0 \\\\ 0 & 1 \\end{pmatrix}", "\\begin{pmatrix} 0 & 1 \\\\ 1 & 0 \\end{pmatrix}"),
        ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{vmatrix} 1 & 2 \\\\ 3 & 4 \\end{vmatrix}"),
        ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{pmatrix} 1 & 2 & 3 & 4 \\end{pmatrix}"),
        ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\\\ 3 & -4 \\end{pmatrix}"),
        ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "-\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}"),
        ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "2\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}"),
        ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}^T"),
        ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "1, 2, 3, 4"),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "(2, 1)"), ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "1 + 2"),
        ("2\\mathbf{i} - \\mathbf{j}", "2\\mathbf{i} + \\mathbf{j}"),
        ("2\\mathbf{i} - \\mathbf{j}", "\\mathbf{i} - 2\\mathbf{j}"), ("3\\vec{a} - 2\\vec{b}", "3\\vec{b} - 2\\vec{a}"),
        ("|\\vec{a}|", "\\vec{a}"), ("\\vec{AB}", "\\vec{BA}"), ("5", "\\begin{pmatrix} 5 \\end{pmatrix}^{-1}"),
    ],
    "powers of ten and bases": [
        ("3 \\times 10^8", "3 \\times 10^9"), ("3 \\times 10^8", "3 \\times 10^{-8}"), ("3 \\times 10^8", "3"),
        ("3 \\times 10^8", "308"), ("300", "3e-2"), ("3", "3e1"), ("35", "3e5"), ("3.5", "3e.5"), ("3e5", "3e"), ("101_2", "101"),
        ("101_2", "101_3"), ("5", "101_3"), ("101", "101_2"), ("1.5 \\times 10^{-4}", "1.5 - 10^4"), ("10^6", "6^{10}"),
        ("10^{-3}", "-10^3"), ("1000", "10^3_2"), ("12_8", "12_{10}"), ("3 \\times 10^8", "3 x 10^{8.1}"),
    ],
    "fractions in words": [
        ("\\frac34", "three"), ("\\frac34", "four thirds"), ("\\frac34", "three and a quarter"), ("\\frac34", "three fours"),
        ("\\frac12", "half of it"), ("\\frac12", "one"), ("3", "three quarters"), ("\\frac23", "two thirds of 2"),
        ("23", "two thirds"), ("\\frac12", "second"), ("1.5", "one half"), ("7", "seventy"), ("7", "seventeen"),
        ("\\frac17", "seven"), ("70", "seven"), ("2", "two thirds"), ("5", "five or six"), ("2.5", "two point five five"),
        ("-7", "seven"),
    ],
    "times, dates and money": [
        ("3:45", "3:54"), ("3:45 PM", "3:45 AM"), ("5:30", "5.30"), ("5:30", "5"), ("3:45", "345"), ("\\$12.50", "€12.50"),
        ("\\$12.50", "12.50 cents"), ("\\$12", "\\$12 million"), ("\\$12", "-\\$12"), ("March 5", "March 15"),
        ("March 5", "May 5"), ("Tuesday", "Thursday"), ("Tuesday", "not Tuesday"), ("Monday", "Monday or Tuesday"),
        ("2024-01-05", "2024-05-01"), ("5/6/2024", "6/5/2024"), ("3 hours", "3 minutes"), ("1 hour 30 minutes", "1 hour"),
        ("1 hour 30 minutes", "30 minutes"), ("50 cents", "\\$50"), ("3 PM", "3 AM"), ("7:00", "7:00 + 1"), ("2:30", "1:15"),
        ("10:30 \\text{ PM}", "10:30 \\text{ AM}"), ("€20", "£20"), ("12", "December"),
    ],
    "ratios": [
        ("2:3", "3:2"), ("2:3", "2:4"), ("1:2:3", "3:2:1"), ("1:2:3", "1:2"), ("2:3", "2, 3"), ("2:3", "23"), ("2:3", "(2, 3)"),
        ("2:3", "-2:3"), ("3:1", "1:3"), ("\\frac23", "3:2"), ("1:4", "4"), ("2:3", "2.3"), ("2:3", "2:3:1"), ("2:3", "5"),
    ],
    "several boxes": [
        ("3", "\\boxed{3} or \\boxed{4}"), ("3", "\\boxed{3}, \\boxed{4}"),
        ("3", "\\boxed{3} is wrong, the answer is \\boxed{4}."), ("3", "\\boxed{4}. Earlier: 3"),
        ("3", "\\boxed{1} \\boxed{2} \\boxed{3}"), ("3", "\\boxed{3}\n\\boxed{5}"), ("3", "\\boxed{2} and \\boxed{3}"),
        ("3", "The answer is 3. \\boxed{4}"), ("3", "\\boxed{\\boxed{4}} 3"), ("3", "\\boxed{3 \\text{ or } 4}"),
        ("3", "\\boxed{3; 4}"), ("3", "\\boxed{3/4}"), ("3", "\\boxed{3 4}"), ("3", "\\boxed{3}^2"), ("3", "-\\boxed{3}"),
        ("3", "\\boxed{3} \\text{ is not the answer}"), ("3", "\\boxed{3}, I think, or maybe \\boxed{7}"),
        ("3", "Not \\boxed{3}."), ("3", "The answer is not $\\boxed{3}$."), ("3", "$2\\boxed{3}$"),
        ("3", "$\\frac{\\boxed{3}}{2}$"), ("3", "\\boxed{3 \\neq x}"), ("3", "\\boxed{x \\neq 3}"),
    ],
    "hedges and negations": [
        ("3", "The answer is 3 or 4."), ("3", "The answer is either 3 or 4"), ("3", "The answer might be 3, or 4."),
        ("3", "The answer is 3, 4 or 5"), ("3", "3 or 4"), ("3", "The answer is 3/4"), ("3", "The answer isn't 3"),
        ("3", "The answer is no longer 3"), ("3", "The answer cannot be 3"), ("3", "I refuse to say that the answer is 3"),
        ("3", "The answer is far from 3"), ("3", "The answer is one of 1, 2, 3"), ("3", "The answer is 2 < 3"),
        ("3", "The answer is between 2 and 3"), ("3", "The answer is not between 2 and 3"), ("3", "The answer is 3 more than x"),
        ("3", "The answer is three times x"), ("3", "The answer exceeds 3"), ("3", "The answer is some number near 3"),
        ("3", "The answer is under 3"), ("3", "The answer is 3 if x > 0"), ("3", "The answer is 3 unless x = 0"),
        ("3", "The answer is the opposite of 3"), ("3", "The answer is minus 3"), ("3", "The answer is negative 3"),
        ("3", "The answer is the square root of 3"), ("3", "The answer is 3 when rounded"),
        ("3", "The answer is approximately 3"), ("3", "The answer is 3?"), ("3", "The answer is 3...5"),
        ("3", "The answer is 3 to 5"), ("3", "The answer is 3–5"), ("3", "Anything except 3"), ("3", "The answer is 1/3"),
        ("3", "The answer differs from 3"),
    ],
    "lookalikes": [
        ("10", "l0"), ("10", "1O"), ("1", "l"), ("1", "I"), ("0", "O"), ("0", "o"), ("5", "S"), ("x", "×"), ("x", "х"),
        ("a", "а"), ("v", "ν"), ("e", "е"), ("3", "Ɛ"), ("2", "ƻ"), ("12", "1２３"), ("x^2", "x₂"), ("x_2", "x²"), ("10", "1⁰"),
        ("12", "1²"), ("32", "3²"), ("3", "3̸"), ("1.5", "1·5"), ("15", "1·5"), ("1/2", "1⁄3"), ("5", "５６"), ("-1", "−−1"),
        ("A", "А"), ("B", "Β"), ("3", "\u202e3\u202c1"),
    ],
}  # fmt: skip
