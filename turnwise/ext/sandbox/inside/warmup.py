"""First uses of the packages, done once before the sessions: each of them would pay the time and the memory again."""

import builtins
import sys

globals()["__builtins__"] = dict(vars(builtins))  # our own: code in the session may replace those of all modules

FIRST_USES = {
    "numpy": """
import numpy
matrix = numpy.arange(9.0).reshape(3, 3) + numpy.eye(3)
numpy.linalg.inv(matrix), numpy.linalg.eigvals(matrix), repr(matrix), numpy.random.rand(2)
""",
    "PIL.Image": """
import io
from PIL import Image
image = Image.new("RGB", (32, 32), "red").resize((16, 16)).crop((0, 0, 8, 8)).convert("L").rotate(10)
for kind in ("PNG", "JPEG"):
    buffer = io.BytesIO()
    image.save(buffer, kind)
    Image.open(buffer).load()
""",
    "pandas": """
import io, pandas
table = pandas.read_csv(io.StringIO("a,b,c\\n1,x,2020-01-01\\n2,y,2020-01-02\\n3,x,2020-01-03\\n"))
table["c"] = pandas.to_datetime(table["c"])
repr(table), repr(table.describe()), table.to_csv()
repr(table.groupby("b")["a"].agg(["sum", "mean"])), table.sort_values("a", ascending=False), table.merge(table, on="b")
table.pivot_table(index="b", values="a"), table[table["a"] > 1].head(), table["b"].value_counts()
""",
    "sympy": """
import sympy
x, y = sympy.symbols("x y")
repr(sympy.solve(x**2 - 2, x)), sympy.solve([x + y - 3, x - y - 1], [x, y]), sympy.simplify((x**2 - 1) / (x - 1))
sympy.integrate(sympy.sin(x) ** 2, x), sympy.diff(sympy.exp(x) * x, x), sympy.factor(x**3 - 1), sympy.latex(x / y)
sympy.limit(sympy.sin(x) / x, x, 0), sympy.factorint(2**20 - 1), sympy.N(sympy.pi, 20)
sympy.Matrix([[1, x], [y, 2]]).det()
""",
    "matplotlib.pyplot": """
from matplotlib import pyplot
figure, axes = pyplot.subplots()
axes.plot([1, 2, 3], [1, 4, 9], label="a")
axes.bar([1, 2], [3, 4])
axes.scatter([1, 2], [3, 4])
axes.imshow([[0.0, 1.0], [1.0, 0.0]])
axes.set(title="title", xlabel="x", ylabel="y")
axes.legend()
figure.canvas.draw()
pyplot.close("all")
""",
    "cv2": """
import cv2, numpy
image = numpy.zeros((32, 32, 3), numpy.uint8)
cv2.rectangle(image, (4, 4), (20, 20), (255, 255, 255), 1)
grey = cv2.cvtColor(image, cv2.COLOR_BGR2GRAY)
edges = cv2.Canny(cv2.GaussianBlur(grey, (3, 3), 0), 50, 150)
cv2.findContours(edges, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE), cv2.resize(image, (64, 64))
cv2.HoughLinesP(edges, 1, numpy.pi / 180, 10), cv2.imdecode(cv2.imencode(".png", image)[1], cv2.IMREAD_COLOR)
""",
    "scipy.ndimage": """
import numpy
from scipy import ndimage
ndimage.label(numpy.eye(8)), ndimage.gaussian_filter(numpy.eye(8), 1), ndimage.rotate(numpy.eye(8), 30)
""",
    "skimage.measure": """
import numpy
from skimage import filters, measure, morphology
mask = numpy.kron(numpy.eye(2), numpy.ones((8, 8))) > 0
[one.area for one in measure.regionprops(measure.label(mask))], filters.threshold_otsu(mask * 1.0)
morphology.erosion(mask)
""",
    # Made now because it reads /proc, which sessions may not.
    "sklearn.cluster": """
import numpy
from sklearn.cluster import DBSCAN, KMeans
points = numpy.arange(20.0).reshape(10, 2)
KMeans(2, n_init=1).fit(points), DBSCAN().fit(points)
""",
    "shapely.geometry": """
from shapely.geometry import Point, Polygon
Polygon([(0, 0), (1, 0), (0, 1)]).contains(Point(0.1, 0.1)), Point(0, 0).buffer(1).area
""",
}


def warm_up() -> None:
    """Uses the loaded packages once, so that sessions need not wait for their first use."""
    for name, code in FIRST_USES.items():
        if name in sys.modules:
            exec(code, {"__name__": "warm_up"})
