r"""Right and wrong answers by kind, (reference, answer) each: for the tests of the math rule, and for comparing it with its peers.

Answers are what a response has in its box, except for the kinds in WHOLE_RESPONSES.
"""

Pair = tuple[str, str]

WHOLE_RESPONSES = frozenset(["negations and comparisons"])

RIGHT: dict[str, list[Pair]] = {
    "units and number words": [
        ("3", "3 cm"), ("3 cm", "3"), ("3", "3 \\text{ meters}"), ("3 \\text{ km/h}", "3 km/h"), ("3", "3 m"), ("5 m", "5m"),
        ("3000000", "3 million"), ("3 million", "3000000"), ("3/2", "3 halves"), ("2/3", "two thirds"), ("36", "3 dozen"),
        ("2.5", "2 and a half"), ("12", "twelve"), ("21", "twenty-one"), ("5 \\text{ cm}^2", "5 square centimeters"),
        ("14", "14 apples"), ("7 \\text{ stuffed goats}", "7 stuffed goats"), ("300 \\text{ cubic feet}", "300 ft^3"),
        ("5 m/s", "5"), ("9.8", "9.8 m/s^2"),
        ("120", "120 dollars"), ("5.4 \\text{ square units}", "\\frac{27}{5}"), ("3", "3 students"), ("1/2", "half"),
        ("3", "\\$3"), ("30", "30 percent"),
    ],
    "signs and operators": [
        ("sin x", "\\sin x"), ("sin x - cos x", "-cos x + sin x"), ("abc", "cab"), ("-abc", "-bca"), ("-\\infty", "-infinity"),
        ("\\infty", "infinity"), ("\\sin x \\cos x", "cos x sin x"), ("positive", "Positive."), ("xy", "yx"),
        ("ab - cd", "-dc + ba"), ("-x", "- x"), ("right-angled", "right angled"), ("n!", "n!"),
        ("\\sin x - \\cos x", "\\sin(x) - \\cos(x)"), ("abc", "a b c"),
    ],
    "negations and comparisons": [
        ("3", "It is certainly 3"), ("3", "So it must be 3."), ("3", "The answer is 3."),
        ("3", "We conclude that the total is 3."), ("3", "The answer is 2. No, the answer is 3"),
        ("3", "There are 3 apples in the basket now."), ("3", "x is not 2, so x = 3"),
        ("3", "Because x cannot be negative, the answer is 3."), ("3", "Not 2: the answer is 3"),
        ("x > 3", "The answer is x > 3"), ("3", "Since 2 is less than 3, the final answer is $3$."),
        ("3", "Hence the value that we get is $3$."),
    ],
    "articles and letters": [
        ("Option A", "option A"), ("Team A", "the Team A"), ("34", "34"), ("the second player", "second player"),
        ("A triangle", "triangle"), ("a circle", "Circle."), ("\\text{the first}", "First"), ("An ellipse", "an ellipse"),
        ("34000", "34 000"), ("vitamin a", "Vitamin A"), ("A and B", "A, B"),
        ("line segment, circle", "\\text{line segment and circle}"), ("Group B", "group B"),
    ],
    "notation": [
        ("300000", "3e5"), ("0.00025", "2.5e-4"), ("x^2", "x**2"), ("x^2+1", "x**2 + 1"), ("2 1/2", "5/2"), ("2.5", "2\\frac12"),
        ("-2.5", "-2\\frac{1}{2}"), ("x^2 y", "y x^2"), ("2x(x+1)", "(x+1) \\cdot 2 \\cdot x"), ("\\frac{7}{3}", "2 1/3"),
        ("3 \\times 10^5", "3e5"), ("2^{10}", "2**10"), ("\\frac{n!}{2}", "\\dbinom{n}{2} (n-2)!"), ("ab^2", "b**2 * a"),
    ],
    "equality": [
        ("x^2 - 1", "(x-1)(x+1)"), ("(x+y)^3", "x^3+3x^2y+3xy^2+y^3"), ("\\frac{1}{x-1} - \\frac{1}{x+1}", "\\frac{2}{x^2-1}"),
        ("\\sin 2x", "2 \\sin x \\cos x"), ("e^{x+1}", "e \\cdot e^x"), ("\\frac{x^2-1}{x-1}", "x+1"),
        ("\\sqrt{8}", "2\\sqrt{2}"), ("\\cos 2x", "1 - 2\\sin^2 x"), ("|x|", "\\sqrt{x^2}"),
        ("\\tan x", "\\frac{\\sin x}{\\cos x}"), ("x^{10} - 1", "(x^5-1)(x^5+1)"), ("\\ln x^2 + 1", "1 + \\ln(x^2)"),
        ("2^{x+1}", "2 \\cdot 2^x"),
    ],
    "several answers": [
        ("$8$,$4$", "4, 8"), ("$-1$,$2$,$-2$", "-2, -1, 2"), ("$(-6,6)$, $(2,6)$", "(2, 6), (-6, 6)"), ("5,1", "1, 5"),
        ("$a=2$, $a=-6-4 \\sqrt{2}$", "2, -6-4\\sqrt{2}"), ("$\\frac{1}{8}\\text{ and }\\frac{1}{10}$", "\\frac1{10}, \\frac18"),
        ("1,3", "3 \\text{ and } 1"), ("$f(x)=x$,$f(x)=-x$", "f(x) = -x \\text{ or } f(x) = x"), ("\\{1, 2\\}", "2, 1"),
        ("2400, 1350, 864", "864, 1350, 2400"), ("$2^{-2/3}$, $8$", "8, \\frac{1}{\\sqrt[3]{4}}"), ("x=1, x=2", "\\{2, 1\\}"),
        ("$(1,2)$ and $(3,4)$", "(3,4), (1,2)"),
    ],
    "labels": [
        ("1,3", "Minimum: 1, Maximum: 3"), ("1,2", "Maximum = 2, Minimum = 1"), ("7,14,18", "Paolo: 18, Qing: 14, Rayna: 7"),
        ("10,11,-2,-1", "Sequence 1: -2, -1 and Sequence 2: 10, 11"), ("Maximum: 3, Minimum: 1", "min: 1, max: 3"),
        ("Tom: 3, Ann: 5", "Ann: 5, Tom: 3"), ("16,3,1", "w=16, d=3, a=1"), ("Area: 5", "5"),
        ("$1,2,3$", "(x, y, z) = (1, 2, 3)"), ("x = 1, y = 2", "y = 2, x = 1"), ("(x, y) = (1, 2)", "(y, x) = (2, 1)"),
        ("$f(n)=n$, $g(n)=1$", "(f(n), g(n)) = (n, 1)"), ("5", "Total cost: 5"), ("3, 4", "Solution 1: 4, Solution 2: 3"),
    ],
    "plus or minus": [
        ("1 \\pm \\sqrt{19}", "1 + \\sqrt{19}, 1 - \\sqrt{19}"), ("\\{1\\pm\\sqrt{5},-2\\}", "\\{-2, 1+\\sqrt5, 1-\\sqrt5\\}"),
        ("0, \\pm 1, \\pm 2", "\\{-2, -1, 0, 1, 2\\}"), ("x = \\pm 3", "3, -3"), ("±3", "x = -3 or x = 3"),
        ("(1, 2), (1, -2), (-1, 2), (-1, -2)", "(\\pm 1, \\pm 2)"), ("\\pm\\frac{1}{2}", "\\frac12, -\\frac12"),
        ("2, -2", "\\pm 2"), ("\\pm 1, 5", "5, -1, 1"), ("(\\pm 1, 0)", "(1, 0), (-1, 0)"),
        ("\\frac{1 \\pm \\sqrt{5}}{2}", "\\frac{1+\\sqrt5}{2}, \\frac{1-\\sqrt5}{2}"), ("\\pm i", "i, -i"),
    ],
    "free letters": [
        ("x = k\\pi", "n\\pi"), ("\\frac{\\pi}{4} + k\\pi", "\\frac{\\pi}{4} + n\\pi"), ("2k\\pi", "2n\\pi, n \\in \\mathbb{Z}"),
        ("x = k\\pi, k \\in \\mathbb{Z}", "x = n\\pi, n \\in \\mathbb{Z}"), ("x^2 + C", "x^2 + K"), ("\\ln x + C", "c + \\ln x"),
        ("[k\\pi, k\\pi + \\frac{\\pi}{2}]", "[n\\pi, n\\pi + \\frac{\\pi}{2}]"),
        ("n = 3k, k \\in \\mathbb{Z}", "3m, m \\in \\mathbb{Z}"),
        ("\\frac{\\pi}{6}+\\pi k, \\frac{\\pi}{3}+\\pi k", "\\frac{\\pi}{3}+n \\pi, \\frac{\\pi}{6}+n \\pi"),
        ("f(x) = x^2", "f(t) = t^2"), ("k\\pi", "k\\pi, \\text{ where } k \\text{ is an integer}"),
        ("\\frac{k\\pi}{3}", "\\frac{m\\pi}{3}"), ("e^t + C_1", "e^t + C"),
    ],
    "for all": [
        ("f(x)=1", "f(x) = 1 \\text{ for all } x \\in \\mathbb{Q}_{>0}"),
        ("f(x) = x + 1", "f(x) = x + 1 \\text{ for every real number } x"),
        ("f(n) = n", "f(n) = n \\text{ for all positive integers } n"), ("f(x)=2x \\text{ for all } x", "f(x) = 2x"),
        ("$f(x)=-1$,$f(x)=x+1$",
         "f(x) = -1 \\text{ for all } x \\in \\mathbb{Z}, \\text{ and } f(x) = x + 1 \\text{ for all } x \\in \\mathbb{Z}"),
        ("f(x) = 0 \\text{ for all real } x", "f(x) = 0 \\text{ for all } x \\in \\mathbb{R}"),
        ("\\forall x > 0, 3^x \\geq x^2", "∀x＞0, 3^x ≥ x^2"),
        ("\\forall x \\in \\mathbb{R}, x^2 \\ge 0", "\\forall x \\in \\mathbb{R}, x^2 \\geq 0"),
        ("g(x) = x", "g(x) = x for all x"), ("f(x) = c", "f(x) = c, \\text{ for any real number } x"),
        ("f(n)=n^2", "f(n) = n^2 \\quad \\forall n \\in \\mathbb{N}"),
        ("$f(n)=n$, $g(n)=1$", "(f(n), g(n)) = (n, 1) \\text{ for all positive integers } n"),
    ],
    "ordinals and circles": [
        ("12", "12^{\\mathrm{th}}"), ("15th Day", "15"), ("②③", "2, 3"), ("②", "2"), ("①②③", "①③②"), ("14th", "14"), ("3rd", "3"),
        ("3", "third"), ("5^{th}", "5"), ("1st", "first"), ("①、③", "①③"), ("2", "2nd"), ("21", "21st"),
    ],
    "rounding": [
        ("30.52", "\\frac{1587}{52}"), ("6.67\\%", "\\frac{1}{15}"), ("41.4\\%", "\\sqrt{2} - 1"), ("$12.55", "\\dfrac{640}{51}"),
        ("180.67", "\\frac{542}{3}\\text{ seconds}"), ("6.67", "20:3"), ("21.93", "21\\frac{13}{14}"),
        ("0.458", "\\frac{27}{59}"), ("3.14", "\\pi"), ("6.46 \\text{ days}", "\\frac{84}{13}"), ("-0.333", "-1/3"),
        ("1.414", "\\sqrt{2}"), ("0.667", "2/3"),
    ],
    "ratios and regions": [
        ("2:1", "2"), ("5:8", "\\frac{5}{8}"), ("1 : (4/3)", "\\frac{3}{4}"),
        ("\\{x | x < \\frac{3}{2}\\} - \\{-6\\}", "(-\\infty, -6) \\cup (-6, \\frac32)"),
        ("x > 0 \\text{ and } x \\ne 1", "(0, 1) \\cup (1, \\infty)"), ("(1, 3]", "(1, 2) \\cup [2, 3]"),
        ("\\mathbb{R}", "(-\\infty, +\\infty)"), ("\\rho\\sin\\theta = \\sqrt{3}", "\\rho = \\sqrt{3} \\csc\\theta"),
        ("\\rho\\sin\\theta = \\sqrt{3}", "\\frac{\\sqrt{3}}{\\sin\\theta}"),
        ("a \\le -2 \\text{ or } a = 1", "(-\\infty, -2] \\cup \\{1\\}"), ("4:6:8", "2:3:4"),
        ("x > 1 \\text{ and } x < 3", "(1, 3)"), ("\\mathbb{R} \\setminus \\{2\\}", "x \\ne 2"), ("\\{x|-1<x<1\\}", "(-1, 1)"),
    ],
    "chains": [
        ("\\tan 1.4 > \\sin 1 > \\cos 1", "\\cos 1 < \\sin 1 < \\tan 1.4"), ("b < a < d < c", "c > d > a > b"),
        ("a < b < c", "c > b > a"),
        ("\\tan \\frac{7\\pi}{5} > \\sin \\frac{2\\pi}{5} > \\cos \\frac{6\\pi}{5}",
         "\\tan \\frac{7}{5} \\pi > \\sin \\frac{2}{5} \\pi > \\cos \\frac{6}{5} \\pi"),
        ("1 < x \\le 2", "2 \\ge x > 1"), ("0 < a < b < 1", "1 > b > a > 0"), ("a \\le b < c", "c > b \\ge a"),
        ("x < y < z < w", "w > z > y > x"), ("2^{0.5} < 3^{0.5} < 2", "\\sqrt{2} < \\sqrt{3} < 2"), ("-1 < 0 < 1", "1 > 0 > -1"),
        ("f(1) < f(2) < f(3)", "f(3) > f(2) > f(1)"), ("20<P<30", "(20, 30)"),
    ],
    "HTML": [
        ("3<sup>x</sup>", "3^x"), ("x<sup>2</sup> + 1", "1 + x^2"), ("a<sub>1</sub>", "a_1"),
        ("x<sub>1</sub> + x<sub>2</sub>", "x_2 + x_1"), ("2<sup>10</sup>", "1024"), ("x &lt; 3", "x < 3"),
        ("x &ge; 3", "[3, \\infty)"), ("3 &times; 10<sup>5</sup>", "300000"), ("10<sup>-3</sup>", "0.001"),
        ("&pi;/2", "\\frac{\\pi}{2}"), ("90&deg;", "90^\\circ"), ("a<SUP>3</SUP>", "a^3"),
        ("∀x＞0, 3<sup>x</sup>≥x<sup>2</sup>", "\\forall x > 0, 3^x \\geq x^2"),
    ],
    "rearranged equations": [
        ("xy = 6", "\\frac{6}{x}"), ("xy = 6", "y = \\frac{6}{x}"), ("y + 1 = -(2x-1)^2", "-4x^2+4x-2"), ("x = y = z = 5", "5"),
        ("y = 2x + 1", "2x - y + 1 = 0"), ("8x-3y+5=0", "3y = 8x + 5"), ("\\frac{x}{2} + \\frac{y}{3} = 1", "3x + 2y = 6"),
        ("x^2 + y^2 = 4", "\\frac{x^2}{4} + \\frac{y^2}{4} = 1"), ("y=-8(x-3)", "-8x + 24"),
        ("\\frac{1}{x} + \\frac{1}{y} = 1", "y + x = xy"), ("x - 2y > 4", "2x - 4y > 8"), ("y = \\frac{x}{x+1}", "xy + y = x"),
        ("x^2 = 4y", "y = \\frac{x^2}{4}"),
    ],
    "rough values": [
        ("5\\sqrt{2}", "x = 5\\sqrt{2} \\approx 7.07"), ("7.07", "x \\approx 7.07"), ("\\pi \\approx 3.14", "3.14"),
        ("\\pi \\approx 3.14", "\\pi"), ("3.14", "\\pi \\approx 3.14"),
        ("5\\sqrt{2} \\text{ cm}", "5\\sqrt{2} \\approx 7.07 \\text{ cm}"), ("x \\approx 3", "3"),
        ("0.67", "\\frac{2}{3} \\approx 0.67"), ("\\frac{2}{3}", "\\frac{2}{3} ≈ 0.667"), ("1.41", "x = \\sqrt{2} ≈ 1.41"),
        ("\\sqrt{2}", "\\sqrt{2} \\approx 1.4"), ("2.50", "x ≈ 2.5"), ("-0.33", "-\\frac{1}{3} \\approx -0.33"),
    ],
    "accents and vectors": [
        ("z\\bar z", "\\bar{z} z"), ("\\bar{z}+1", "1+\\overline{z}"), ("\\bar z", "\\overline{z}"),
        ("2\\vec{a}+\\vec{b}", "\\vec b + 2 \\vec a"), ("\\vec{a}+\\vec{b}", "\\overrightarrow{b}+\\overrightarrow{a}"),
        ("3\\mathbf{i}+4\\mathbf{j}", "4\\hat{j}+3\\hat{i}"), ("3\\mathbf{i}+4\\mathbf{j}", "3i+4j"),
        ("\\hat{y}=1.5x+2", "y=1.5x+2"), ("\\hat{y}=1.5x+2", "\\hat{y} = 2+1.5x"), ("1/3", "0.\\overline{3}"),
        ("\\overline{AB}", "\\overline{AB}"), ("AB = 5", "\\overline{AB} = 5"), ("|\\vec{a}| \\cdot 2", "2|\\vec{a}|"),
        ("2 \\cdot \\vec{a}", "2\\vec{a}"), ("\\vec{a}\\times\\vec{b}", "\\vec a \\times \\vec b"), ("\\bar{x}_1", "\\bar{x_1}"),
        ("\\overrightarrow{AB}+\\overrightarrow{AC}", "\\overrightarrow{AC}+\\overrightarrow{AB}"),
    ],
    "unknown functions": [
        ("x(x+1)", "x^2+x"), ("a(b+c)", "ab+ac"), ("k(k+1)", "k^2+k"), ("n(n+1)/2", "\\frac{n^2+n}{2}"), ("A(B+C)", "AB+AC"),
        ("N(N-1)", "N^2-N"), ("uv(u+v)", "u^2v+uv^2"), ("P(1+r)^t", "P(r+1)^t"), ("E(X)^2+1", "1+(E(X))^2"), ("T(n)+1", "1+T(n)"),
        ("P(A)+P(B)", "P(B)+P(A)"), ("R(1-\\cos\\theta)", "R-R\\cos\\theta"), ("\\alpha(\\beta+1)", "\\alpha\\beta+\\alpha"),
        ("E(2X)", "E(X \\cdot 2)"),
    ],
    "logic, figures and sets": [
        ("1, 2", "x = 1 or 2"), ("1, 2", "x = 1 \\lor x = 2"),
        ("1, 3", "x_1 = 1 or x_2 = 3"), ("1 or 3", "3 and 1"), ("x=1 or x=2", "x=2 and x=1"),
        ("p \\land q", "q \\land p"), ("x=1 and y=2", "y=2, x=1"), ("x=1 and y=2", "(1,2)"), ("\\angle ABC", "∠ABC"),
        ("\\angle ABC", "ABC"), ("\\angle A = 60^\\circ", "60^\\circ"), ("60^\\circ", "∠A = 60°"),
        ("\\angle A = 60^\\circ", "A = 60^\\circ"), ("∆ = 4", "4"), ("\\{1\\}", "1"), ("1", "\\{1\\}"), ("\\{1,2\\}", "1, 2"),
        ("\\{1\\}, \\{2\\}", "\\{2\\}, \\{1\\}"), ("10000", "10{,}000"), ("1234567", "1{,}234{,}567"), ("1000", "1,\\!000"),
        ("(1,2) or (3,4)", "(3,4) and (1,2)"), ("f(x)=x or f(x)=-x", "f(x)=-x and f(x)=x"),
        ("\\{\\{1\\}, \\{2\\}\\}", "\\{\\{2\\}, \\{1\\}\\}"), ("x<1 \\text{ or } x>3", "x>3 or x<1"),
    ],
}  # fmt: skip

WRONG: dict[str, list[Pair]] = {
    "units and number words": [
        ("5 m/s", "5 m"), ("5 m", "5 m/s"), ("5 m/s^2", "5 m/s"), ("3m/g", "3"), ("5x/s", "5x"),
        ("3", "3 million"), ("3", "3 halves"), ("3", "3 squared"), ("3", "3 point five"), ("3", "3 minus two"),
        ("3", "3 factorial"), ("3", "3 wrong"), ("3", "3 (false)"), ("3", "3 cubed"), ("3", "3 plus one"), ("3", "3 negative"),
        ("3", "3 dozen"), ("3", "3rd power"), ("3", "3 hundred"), ("3", "3 over two"), ("3", "3 \\text{ thousand}"),
        ("3", "3 thirds"), ("3", "3%%"), ("3", "3 \\text{ or more}"), ("5 cm", "5 m"), ("5 cm", "5 \\text{ cm}^2"),
        ("3 million", "3"), ("3 km/h", "3 km"), ("3", "3 quarters"), ("3", "three and a half"), ("20", "twenty-one"),
        ("3", "3 doubled"), ("3", "3 less"), ("3m", "3"), ("3", "3 incorrect"), ("3", "\\$3\\%"),
        ("2 \\text{ goats}", "2 \\text{ sheep and a half}"), ("3", "3 times ten"), ("1/3", "third"), ("3", "\\text{3 million}"),
    ],
    "signs and operators": [
        ("sin x", "-sin x"), ("sin x - cos x", "sin x cos x"), ("abc", "-abc"), ("infinity", "-infinity"),
        ("positive", "-positive"), ("abc", "abc!"), ("\\infty", "-\\infty"), ("sin x", "sin -x"), ("ab", "a-b"), ("abc", "ab-c"),
        ("xyz", "x!yz"), ("cos x", "cos x!"), ("sin x + cos x", "sin x - cos x"), ("- abc", "abc"), ("even", "-even"),
        ("log x", "-log x"), ("yes", "-yes"), ("ab cd", "ab - cd"),
    ],
    "negations and comparisons": [
        ("3", "I doubt that it is $3$"), ("3", "Nobody would ever say $3$"), ("3", "Is the answer really 3?"),
        ("3", "Answer: 3? No."), ("3", "An upper bound for it is 3"), ("3", "The number that we want is 3 squared"),
        ("3", "It will be 3 million"), ("3", "The result isn’t 3"),
        ("3", "It is certainly not 3"), ("3", "It is less than 3"), ("3", "It is anything but 3"), ("3", "~3"),
        ("3", "The answer is ~3"), ("3", "It can't be 3"), ("3", "We know that it is at least 3"), ("3", "The wrong answer is 3"),
        ("3", "It is not true that the answer is 3"), ("3", "The answer is not 3"), ("3", "The answer is anything but 3"),
        ("3", "I think that it is more than 3"), ("3", "It is never going to be 3"), ("3", "The total is approximately 3"),
        ("3", "It is nearly always around 3"), ("3", "Saying that it is 3 is wrong"), ("3", "The answer is less than 3"),
        ("3", "The answer is ≈ 3"), ("3", "Answer: at most 3"), ("3", "The total can be up to 3"),
        ("3", "No number is equal to 3 except this"), ("3", "The answer is 3 or 4"), ("3", "The opposite of the result is 3"),
    ],
    "articles and letters": [
        ("A", "\\text{(A)} - 3"), ("B", "(B)^2 + 1"),
        ("Option A", "Option"), ("Team A", "team"), ("34", "3 4"), ("Option A", "Option B"), ("Plan A", "A plan"),
        ("3400", "3 4 0 0"), ("vitamin A", "vitamin"), ("a b", "b"), ("Group A", "the group"), ("12", "1 2"), ("1000", "1 00 0"),
        ("A", "an"), ("Box A", "a box"), ("A circle", "circles"), ("Class A", "Class a b"), ("345", "3 45"),
    ],
    "notation": [
        ("3", "3e5"), ("3e5", "3e-5"), ("300000", "3e6"), ("x^2", "x*2"), ("x^2", "x 2"), ("2 1/2", "1"), ("5/2", "2 \\cdot 1/2"),
        ("2.5", "2 1/3"), ("x^2 y", "x y^2"), ("2**3", "6"), ("x^6", "x**2**3"), ("-1.5", "-2\\frac12"), ("3e5", "3e"),
        ("2.5", "2 5"), ("2^{81}", "2**3**4"),
    ],
    "equality": [
        ("x^2", "x^2 + 10^{-30}"), ("x^2", "x^2 + (x-1)(x-2)(x-3)(x-4)"), ("x", "x + \\frac{(x-1)(x-2)(x-3)}{10^{40}}"),
        ("x", "|x|"), ("x", "\\sqrt{x^2}"), ("x", "x + \\frac{1 - |x| + |1 - |x||}{2}"), ("0", "\\sin(\\pi x)"),
        ("x", "x + \\sin(\\pi x) 10^{-20}"), ("x", "\\lfloor x \\rfloor"), ("\\sin x", "\\sin(x + 10^{-12})"),
        ("\\pi", "\\frac{355}{113}"), ("e^x", "1 + x + \\frac{x^2}{2}"), ("x^{10}", "x^{11}"), ("2^x", "x^2"),
        ("(x+y)^2", "x^2 + y^2"), ("x", "\\arcsin(\\sin x)"), ("x", "x + \\frac{1}{10^{35}}"),
    ],
    "several answers": [
        ("$8$,$4$", "8"), ("$8$,$4$", "4, 8, 8"), ("$8$,$4$", "84"), ("$-1$,$2$", "1, 2"), ("5,1", "(1, 5)"),
        ("$(1,2)$, $(3,4)$", "(2,1), (3,4)"), ("$8$,$4$", "8 - 4"), ("$a=2$, $a=3$", "b = 2, b = 3"), ("1,2,3", "1, 2"),
        ("$(1,2)$, $(3,4)$", "1, 2, 3, 4"), ("$8, $4", "8"), ("$f(x)=x$,$f(x)=-x$", "f(x) = x"), ("2, 2", "2"),
        ("1,3", "1 \\text{ or } 3 \\text{ or } 5"),
    ],
    "labels": [
        ("(1, 2)", "(y, x) = (1, 2)"), ("3", "Error: 3"),
        ("1,3", "Minimum: 3, Maximum: 1"), ("1,3", "Minimum: 1, Maximum: 2"),
        ("Maximum: 3, Minimum: 1", "Maximum: 1, Minimum: 3"), ("Tom: 3, Ann: 5", "Tom: 5, Ann: 3"), ("3", "Minus: 3"),
        ("3", "Not: 3"), ("3", "Twice: 3"), ("3", "Half: 3"), ("3", "minus = 3"), ("x = 1, y = 2", "x = 2, y = 1"),
        ("16,3,1", "w=3, d=16, a=1"), ("7,14,18", "Paolo: 18, Qing: 14"), ("3, 4", "Solution 1: 3"),
        ("(x, y) = (1, 2)", "(x, y) = (2, 1)"), ("3", "Less than: 3"), ("Tom: 3, Ann: 5", "5, 3"), ("3", "Opposite: 3"),
        ("3", "Square root of: 3"), ("1, 2", "not: 1, not: 2"),
    ],
    "plus or minus": [
        ("1 \\pm \\sqrt{19}", "1 + \\sqrt{19}"), ("3", "\\pm 3"), ("\\pm 3", "3"),
        ("\\{1\\pm\\sqrt{5},-2\\}", "\\{2, 1+\\sqrt5, 1-\\sqrt5\\}"), ("0, \\pm 1, \\pm 2", "0, 1, 2"),
        ("(1, 2), (-1, -2)", "(\\pm 1, \\pm 2)"), ("(\\pm 1, 0)", "(0, \\pm 1)"), ("\\pm 2", "\\pm 3"), ("2, -2", "\\pm 2, 0"),
        ("1 \\pm 2", "3, 1"), ("\\frac{1 \\pm \\sqrt{5}}{2}", "\\frac{1}{2} \\pm \\sqrt{5}"), ("-3", "\\mp 3"),
        ("\\pm 1", "1, 1"),
    ],
    "free letters": [
        ("x = k\\pi", "2n\\pi"), ("n + 1", "k + 1"), ("n", "k"), ("k\\pi", "\\pi"),
        ("\\frac{\\pi}{4} + k\\pi", "\\frac{\\pi}{3} + n\\pi"),
        ("x = k\\pi, k \\in \\mathbb{Z}", "x = k\\pi, k \\in \\mathbb{N}"), ("a + b + c", "a + b + C"), ("2n - 1", "2m - 1"),
        ("x^2 + C", "x^2"), ("x^2 + C", "x^2 + 2C"), ("c", "C"), ("x^2 + C", "x^2 + x"), ("n\\pi + 1", "x\\pi + 1"),
        ("k\\pi", "k"), ("a\\pi", "b\\pi"), ("2^n", "2^k"), ("\\frac{n\\pi}{4}", "\\frac{\\pi}{4n}"),
    ],
    "for all": [
        ("3", "f(x) = 3 \\text{ for some } x"),
        ("f(x)=1", "f(x) = 1 \\text{ for all } x > 5"), ("f(x)=1", "f(x) = x \\text{ for all } x \\in \\mathbb{R}"),
        ("f(x) = 1", "f(x) = 1 \\text{ for some } x > 0"),
        ("f(x) = 0 \\text{ for all } x \\in \\mathbb{Z}", "f(x) = 0 \\text{ for all } x \\in \\mathbb{R}"),
        ("f(x)=1", "f(x) = 1 \\text{ for all } x \\ne 0"), ("\\forall x > 0, 3^x \\geq x^2", "\\forall x > 0, 3^x \\geq x"),
        ("\\forall x > 0, 3^x \\geq x^2", "\\exists x > 0, 3^x \\geq x^2"),
        ("\\forall x > 0, 3^x \\geq x^2", "\\forall x < 0, 3^x \\geq x^2"), ("\\forall x > 0, x \\ge 1", "x \\ge 1"),
        ("f(x)=1", "f(x) = 1 \\text{ for no } x"), ("f(x)=x", "f(x) = x \\text{ for all odd } x"),
        ("f(n) = n", "f(n) = n + 1 \\text{ for all positive integers } n"), ("f(x)=x", "f(x) = x \\text{ for all negative } x"),
    ],
    "ordinals and circles": [
        ("12", "11^{\\mathrm{th}}"), ("②③", "23"), ("②③", "1, 2"), ("②③", "②"), ("15th Day", "16"), ("②③", "(2, 3)"),
        ("23", "②③"), ("3", "fourth"), ("1/3", "3rd"), ("①②③", "①②④"), ("12", "①②"), ("5^{th}", "5^2"), ("2", "②③"),
        ("2", "2 seconds and a half"),
    ],
    "rounding": [
        ("2.50", "\\frac{2503}{1000}"), ("30.52", "\\frac{30519}{1000}"),
        ("30.52", "\\frac{1588}{52}"), ("\\frac{600}{7}", "85.71"), ("6.01", "6\\frac{1}{64}"), ("6.67\\%", "\\frac{1}{8}"),
        ("0.5", "\\frac{9}{20}"), ("1/3", "0.333"), ("6.67", "20:7"), ("30.52", "30.519"), ("30.52", "30.5"), ("0.33", "1/3"),
        ("300", "299.94"), ("3.14", "3.1416"), ("3", "\\pi"), ("6.67 \\text{ cm}", "\\frac{20}{3} \\text{ m}"),
        ("180.67", "\\frac{542}{3}\\text{ wrong}"), ("41.4\\%", "41\\%"), ("785.12", "784"), ("-0.333", "1/3"),
        ("1.27\\%", "1.3\\%"),
    ],
    "ratios and regions": [
        ("2:1", "1:2"), ("2:1", "1/2"), ("5:8", "8:5"), ("4:6:8", "2:3"),
        ("\\{x | x < \\frac{3}{2}\\} - \\{-6\\}", "(-\\infty, \\frac32)"),
        ("\\{x | x < \\frac{3}{2}\\} - \\{-6\\}", "(-\\infty, -6) \\cup (-6, \\frac32]"),
        ("x > 0 \\text{ and } x \\ne 1", "(0, \\infty)"), ("(1, 3]", "(1, 2) \\cup (2, 3]"),
        ("\\rho\\sin\\theta = \\sqrt{3}", "\\sqrt{3} \\sin\\theta"), ("\\mathbb{R} \\setminus \\{2\\}", "\\mathbb{R}"),
        ("x > 1 \\text{ and } x < 3", "x > 1"), ("[1, 3]", "(1, 3)"), ("2:0", "1:0"), ("(1, 3)", "(1, 2) \\cup (2, 3)"),
        ("x > 1 \\text{ and } x < 3", "x > 1 \\text{ or } x < 3"),
    ],
    "chains": [
        ("b < a < d < c", "c < d < a < b"), ("b < a < d < c", "b > a > d > c"), ("b < a < d < c", "b < a < d"),
        ("a \\le b < c", "a < b < c"), ("\\tan 1.4 > \\sin 1 > \\cos 1", "\\tan 1.4 > \\cos 1 > \\sin 1"),
        ("0 < a < b < 1", "0 < b < a < 1"), ("1 < x \\le 2", "1 < x < 2"), ("a < b < c", "a < b > c"), ("b < a < d < c", "bad c"),
        ("x < y < z < w", "x < z < y < w"), ("20<P<30", "(20, 25)"), ("f(1) < f(2) < f(3)", "f(1) < f(3) < f(2)"),
    ],
    "HTML": [
        ("3<sup>x</sup>", "3x"), ("x<sup>2</sup> + 1", "x2 + 1"), ("a<sub>1</sub>", "a_2"), ("2<sup>10</sup>", "210"),
        ("x &lt; 3", "x > 3"), ("10<sup>-3</sup>", "1000"), ("3<sup>x</sup>", "x^3"), ("a<sub>1</sub>", "a^1"),
        ("x &ge; 3", "x > 3"), ("&pi;/2", "\\pi"), ("x<sup>2</sup>", "x<sub>2</sub>"), ("3 &times; 10<sup>5</sup>", "3 + 10^5"),
        ("a<SUP>3</SUP>", "3a"),
    ],
    "rearranged equations": [
        ("1 < 2", "1 < 3"),
        ("xy = 6", "\\frac{6}{x+1}"), ("xy = 6", "6x"), ("xy = 6", "\\frac{x}{6}"), ("y + 1 = -(2x-1)^2", "-4x^2+4x-1"),
        ("x(y-1) = 0", "y = 1"), ("y = 1", "x(y-1) = 0"), ("y^2 = x", "\\sqrt{x}"),
        ("x^2 + y^2 = 4", "\\frac{x^2}{4} - \\frac{y^2}{4} = 1"), ("x - 2y > 4", "4y - 2x > -8"), ("xy > 6", "y > \\frac{6}{x}"),
        ("A = 60", "A = B = 60"), ("2x + y = 5", "5"), ("xy = 6", "\\frac{6}{t}"), ("x + y = 1", "x + y = 2"),
        ("x = y = z = 5", "x = y = 5"), ("(y-x)^2 = 0", "y = 2x"),
    ],
    "rough values": [
        ("3", "4 \\approx 3"), ("2", "1 \\approx 2"), ("0", "0.9 \\approx 0"), ("1", "\\frac{1}{100} \\approx 1"),
        ("0.5", "0.6 \\approx 0.5"), ("3", "\\pi \\approx 3"), ("3", "4 ~ 3"), ("3", "x \\approx 3"),
        ("7.10", "7.14 \\approx 7.10"), ("0.5", "0.46 \\approx \\frac{1}{2}"), ("7", "5\\sqrt{2} \\approx 7"),
        ("\\pi", "\\pi \\approx 3.15"), ("3", "3 ≈ 4"),
    ],
    "accents and vectors": [
        ("z\\bar z", "z^2"), ("\\bar z+1", "z+1"), ("\\bar{z}+1", "z+1"), ("\\overline{z}", "z"), ("A\\bar B+\\bar A B", "2AB"),
        ("\\vec a\\times\\vec b", "\\vec b\\times\\vec a"), ("\\vec{a}\\times\\vec{b}", "\\vec{b}\\times\\vec{a}"),
        ("\\vec{a}\\times\\vec{b}", "\\vec{a}\\cdot\\vec{b}"), ("\\mathbf{a}\\times\\mathbf{b}", "\\mathbf{b}\\times\\mathbf{a}"),
        ("2\\vec{a}\\times\\vec{b}", "2\\vec{b}\\times\\vec{a}"), ("\\hat{i}\\times\\hat{j}", "\\hat{j}\\times\\hat{i}"),
        ("\\overrightarrow{AB}\\times\\overrightarrow{AC}", "\\overrightarrow{AC}\\times\\overrightarrow{AB}"),
        ("\\tilde x + x", "2x"), ("\\hat{x}+x", "2x"),
        ("(\\vec{a}+\\vec{b})\\times\\vec{c}", "\\vec{c}\\times(\\vec{a}+\\vec{b})"), ("\\vec{a}", "\\hat{a}"),
    ],
    "unknown functions": [
        ("S(n)", "Sn"), ("V(2X)", "2V(X)"), ("\\sigma(m)\\sigma(n)", "\\sigma(mn)\\sigma"), ("E(X^2)", "E(X)^2"),
        ("E[X^2]", "E[X]^2"), ("P(A)+P(B)", "P(A+B)"), ("T(n)", "nT"), ("u(x)v(x)", "uvx^2"), ("\\phi(n)", "n\\phi"),
        ("P_1(x)", "xP_1"), ("D(X+Y)", "D(X)+D(Y)"), ("f_1(x)", "xf_1"), ("p(x)q(x)", "pqx^2"), ("T(n)T(m)", "T(nm)T"),
    ],
    "logic, figures and sets": [
        ("p \\land q", "p \\lor q"), ("x=1 and y=2", "x=1 or y=2"), ("x=1, y=2", "x=1 or y=2"), ("(1,2)", "x=1 or y=2"),
        ("\\triangle ABC", "\\angle ABC"), ("△ABC", "∠ABC"), ("\\{1\\}", "\\{\\{1\\}\\}"), ("\\emptyset", "\\{\\emptyset\\}"),
        ("\\{\\emptyset\\}", "\\emptyset"), ("\\{1, 2\\}", "\\{\\{1\\}, 2\\}"), ("17", "1{,}7"), ("17", "1,\\!7"),
        ("x+y=1 and x-y=2", "x+y=1 or x-y=2"), ("p and q", "p or q"), ("x=1 and y=1 or x=2 and y=2", "x=1 and y=2 or x=2 and y=1"),
        ("1", "\\{\\{1\\}\\}"),
    ],
}  # fmt: skip


def is_right(truth: str, answer: str, tolerance: float = 0.0, *, strict: bool = False, key: int = 7) -> bool:
    """The rule's verdict on an answer, without its worker processes."""
    from plaudit.rewards.rules.math import references
    from plaudit.rewards.rules.maths import worker
    from plaudit.rewards.rules.maths.answers import compare_plainly, normalise

    [reference], answer = references(truth), normalise(answer)
    plainly = compare_plainly(answer, reference, tolerance, strict)
    return plainly if plainly is not None else bool(worker.compare(answer, reference, key, tolerance, strict)["score"])
