// Applies the chosen theme before the first paint. It is a classic script, because modules run
// later. Without a choice, the style sheet follows the system's setting.
"use strict";
try {
  const theme = localStorage.getItem("tidegate.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is disabled in this browser.
}
