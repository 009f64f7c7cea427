/* Sorts a table by the column that is clicked. The part of the plugin of this name that asv's pages use. */
(function ($) {
  "use strict";
  var orders = {
    "int": function (a, b) { return parseInt(a, 10) - parseInt(b, 10); },
    "float": function (a, b) { return parseFloat(a) - parseFloat(b); },
    "string": function (a, b) { return a.toString().localeCompare(b.toString()); }
  };
  $.fn.stupidtable = function (more) {
    return this.each(function () {
      var table = $(this);
      table.data("orders", $.extend({}, orders, more || {}));
      table.on("click", "thead th", function () { $(this).stupidsort(); });
    });
  };
  $.fn.stupidsort = function (wanted) {
    var head = this.first(), table = head.closest("table");
    var order = (table.data("orders") || orders)[head.data("sort")];
    if (!order) { return this; }
    var direction = wanted || (head.data("sort-dir") === "asc" ? "desc" : "asc");
    var column = head.index(), body = table.children("tbody"), rows = body.children("tr").get();
    function value(row) {
      var cell = $(row).children().eq(column), given = cell.data("sort-value");
      return given === undefined ? cell.text() : given;
    }
    rows.sort(function (a, b) { return (direction === "asc" ? 1 : -1) * order(value(a), value(b)); });
    body.append(rows);
    head.siblings().data("sort-dir", null);
    head.data("sort-dir", direction);
    table.trigger("aftertablesort", { column: column, direction: direction });
    return this;
  };
})(jQuery);
