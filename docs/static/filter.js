// A field above each long table: it shows only the rows that contain what is typed.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table")) {
    const rows = [...table.querySelectorAll("tbody tr")];
    if (rows.length < 50) continue;
    const field = Object.assign(document.createElement("input"), { type: "search", placeholder: `Filter ${rows.length} rows` });
    field.addEventListener("input", () => {
      const typed = field.value.toLowerCase();
      for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(typed);
    });
    table.before(field);
  }
});
